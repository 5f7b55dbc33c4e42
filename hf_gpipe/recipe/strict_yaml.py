"""YAML read strictly, with the line of every value, and written back so that it reads the same.

Stricter than YAML 1.1: only true and false are booleans (`no` is Norwegian), 2e-3 is a number, 010 is not eight, and
dates are strings. A key may occur only once in a mapping. Tags, and aliases that contain themselves, are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from hf_gpipe.errors import RecipeError
from hf_gpipe.text import show

KeyPath = tuple[object, ...]
"""The keys from the top to a value; for an entry of a list, its index."""

_DEEPEST = 50
#: Values of a recipe, each counted wherever an alias repeats it: a few lines of aliases can stand for billions.
_MOST_VALUES = 20_000
#: Characters of a recipe's text. The parser takes a second for this many.
LONGEST = 1 << 18

_RESOLVERS: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
)


class Locations:
    """Where each value of a recipe was written: "recipe.yaml, line 12" or "override 'a.b=3'".

    Attributes:
        source: the file.
        blank: where nothing was written, which YAML reads as null.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.blank: set[KeyPath] = set()
        self._places: dict[KeyPath, str] = {}

    def of(self, path: KeyPath) -> str:
        """The place of the value at `path`, or of the nearest value that encloses it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._places:
                return self._places[path[:length]]
        return self.source

    def add_line(self, path: KeyPath, line: int) -> None:
        """Record that the value at `path` is on `line`, counted from 1."""
        self._places[path] = f"{self.source}, line {line}"

    def replace(self, path: KeyPath, place: str) -> None:
        """Record that the value at `path`, with all below it, now comes from `place`."""
        self.forget(path)
        self._places[path] = place

    def take(self, other: Locations, path: KeyPath) -> None:
        """Take the places of the value at `path`, and of all below it, from `other`."""
        self.forget(path)
        self.blank |= {known for known in other.blank if known[: len(path)] == path}
        self._places |= {known: at for known, at in other._places.items() if known[: len(path)] == path}

    def forget(self, path: KeyPath) -> None:
        """Forget the places of the value at `path` and of all below it."""
        self.blank = {known for known in self.blank if known[: len(path)] != path}
        self._places = {known: at for known, at in self._places.items() if known[: len(path)] != path}


class _Loader(yaml.SafeLoader):
    _depth = 0
    num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise yaml.MarkedYAMLError(problem=f"tags such as {tag!r} are not allowed", problem_mark=event.start_mark)
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels", problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this module or another YAML 1.1 reader would not read as a string."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_list(self, data: Iterable[Any]) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Loader.yaml_implicit_resolvers = {}
for _sequence in (list, tuple):
    _Dumper.add_representer(_sequence, _Dumper.represent_list)
for _name, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def read(text: str, source: str) -> tuple[Any, Locations]:
    """Parse YAML text into dict, list, str, bool, int, float and None; also return the place of each value.

    Raises:
        RecipeError: text that does not parse, a duplicate key, a tag, an alias that contains itself, more than 50
            levels, or too many values; the message has the line and the column.
    """
    locations = Locations(source)
    if len(text) > LONGEST:
        raise RecipeError(
            f"{source} has {len(text)} characters, and a recipe has at most {LONGEST}; divide it, with extends."
        )
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else _value(loader, node, (), locations, frozenset()), locations
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise RecipeError(f"{source}{_position(error.problem_mark)}: {_sentence(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{source}: the YAML cannot be read: {' '.join(str(error).split())}.") from error


def read_mapping(text: str, source: str) -> tuple[dict[Any, Any], Locations]:
    """Parse a recipe's text into a mapping of sections; also return the place of each value.

    Raises:
        RecipeError: the text is not a mapping, or any error of `read`.
    """
    data, locations = read(text, source)
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe must be a mapping of sections, such as `model:`; found {show(data)}.")
    return data, locations


def write(value: Any) -> str:
    """Return YAML text that `read` turns into an equal value; keys keep their order, lists are written in brackets."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)


def _value(
    loader: _Loader, node: yaml.Node, path: KeyPath, locations: Locations, enclosing: frozenset[yaml.Node]
) -> Any:
    loader.num_values += 1
    if loader.num_values > _MOST_VALUES:
        raise yaml.MarkedYAMLError(
            problem=f"more than {_MOST_VALUES} values, those that aliases repeat included", problem_mark=node.start_mark
        )
    if node in enclosing:
        raise yaml.MarkedYAMLError(problem="an alias contains itself", problem_mark=node.start_mark)
    inside = enclosing | {node}
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, entry, (*path, i), locations, inside) for i, entry in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        if isinstance(node, yaml.ScalarNode) and not node.value and not node.style:
            locations.blank.add(path)
        return loader.construct_object(node)
    mapping: dict[Any, Any] = {}
    lines: dict[Any, int] = {}
    for key, key_node, value_node in _items(loader, node):
        line = key_node.start_mark.line + 1
        if key in mapping:
            raise yaml.MarkedYAMLError(
                problem=f"the key {key!r} is given twice, first on line {lines[key]}", problem_mark=key_node.start_mark
            )
        lines[key] = line
        locations.add_line((*path, key), line)
        mapping[key] = _value(loader, value_node, (*path, key), locations, inside)
    return mapping


def _items(loader: _Loader, node: yaml.MappingNode) -> Iterator[tuple[Any, yaml.Node, yaml.Node]]:
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key is a list or a mapping", problem_mark=key_node.start_mark)
        yield loader.construct_object(key_node), key_node, value_node


def _position(mark: yaml.Mark | None) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _sentence(error: yaml.MarkedYAMLError) -> str:
    if type(error) is yaml.MarkedYAMLError:  # raised in this file: valid YAML that a recipe may not contain
        return f"{error.problem}."
    return f"the YAML does not parse: {f'{error.context}, ' if error.context else ''}{error.problem}."
