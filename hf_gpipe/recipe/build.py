"""A tree of dataclasses filled from a mapping; every key must exist and every value must fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from hf_gpipe.errors import RecipeError, nearest
from hf_gpipe.recipe.strict_yaml import KeyPath, Locations, read
from hf_gpipe.recipe.typed import MismatchError, choices, convert, describe, shorten, show

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def fill(cls: type[T], data: object, locations: Locations) -> T:
    """An instance of the dataclass `cls`, whose fields are values or dataclasses themselves ("sections").

    A section that is absent or null is filled from its defaults.

    Raises:
        RecipeError: an unknown key, a required key that is missing, or a value of the wrong type or out of range;
            names the place, the key, what was found and what is allowed.
    """
    return _fill(cls, data, locations, (), leaf_keys(cls))


def leaf_keys(cls: type[DataclassInstance]) -> list[KeyPath]:
    """The path of every value of a tree of dataclasses, in the order of the fields."""
    hints = get_type_hints(cls, include_extras=True)
    return [
        (field.name, *rest)
        for field in fields(cls)
        for rest in (leaf_keys(hints[field.name]) if is_dataclass(hints[field.name]) else [()])
    ]


def apply_overrides(data: object, overrides: Iterable[str], locations: Locations) -> None:
    """Write each `key=value` into `data`, a mapping of mappings; the value is YAML, the key dotted.

    An override replaces what stands at its key, and later overrides replace earlier ones.

    Raises:
        RecipeError: no `key=value`, a value that is no YAML, or a key below a value that is no mapping.
    """
    for override in overrides:
        place = f"override {shorten(repr(override))}"
        key, equals, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise RecipeError(f"{place}: expected key=value, for example pipeline.num_stages=4.")
        value, _ = read(text, place)
        locations.replace(_set(data, path, value, place), place)


def dotted(path: KeyPath) -> str:
    """A path as a user writes it: "pipeline.num_stages"."""
    return ".".join(str(key) for key in path)


def _fill(cls: type[T], data: object, locations: Locations, path: KeyPath, known: list[KeyPath]) -> T:
    if data is None and path:
        data = {}
    if not isinstance(data, Mapping):
        name = dotted(path) or "a recipe"
        raise RecipeError(f"{locations.of(path)}: {name} must be a mapping of keys to values, found {show(data)}.")
    hints = get_type_hints(cls, include_extras=True)
    for key in data:
        if key not in hints:
            found = (*path, key)
            raise RecipeError(f"{locations.of(found)}: {dotted(found)} is not a key of a recipe{_hint(found, known)}")
    values: dict[str, Any] = {}
    for field in fields(cls):
        expected, here = hints[field.name], (*path, field.name)
        if isinstance(expected, type) and is_dataclass(expected):
            values[field.name] = _fill(expected, data.get(field.name), locations, here, known)
        elif field.name in data:
            values[field.name] = _fit(data[field.name], expected, locations, here)
        elif _is_required(field):
            raise RecipeError(
                f"{locations.source}: {dotted(here)} is missing and has no default; give it {describe(expected)}."
            )
    return cls(**values)


def _fit(value: Any, expected: Any, locations: Locations, path: KeyPath) -> Any:
    try:
        return convert(value, expected)
    except MismatchError as error:
        hint = nearest(error.found, choices(error.expected)) if isinstance(error.found, str) else ""
        raise RecipeError(f"{locations.of(path)}: {dotted(path)}{error.within}: {error}{hint}") from error


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _set(data: object, path: KeyPath, value: Any, place: str) -> KeyPath:
    """Write `value` at `path` and the missing mappings on the way; the path of the outermost thing written."""
    written = path
    for depth, key in enumerate(path):
        if not isinstance(data, dict):
            raise RecipeError(
                f"{place}: {dotted(path[:depth]) or 'the recipe'} is {show(data)}, so it has no key {key!r} to set."
            )
        if depth == len(path) - 1:
            data[key] = value
        elif data.get(key) is None:
            data[key] = {}
            written = min(written, path[: depth + 1], key=len)
        data = data[key]
    return written


def _hint(found: KeyPath, known: list[KeyPath]) -> str:
    """Names what was probably meant: the same key elsewhere, or the nearest section or key, its own section first."""
    section, name = found[:-1], str(found[-1])
    if name in {dotted(key) for key in known}:
        return f"; in a file a dot is a level: write {name.rpartition('.')[2]!r} below {name.rpartition('.')[0]!r}"
    own = [key for key in known if key[:-1] == section]
    same_name = [key for key in known if key[-1] == name]
    near_section = "" if section or same_name else nearest(name, {str(key[0]) for key in known})
    if near_section:
        return near_section
    for group in (same_name, own, known):
        close = difflib.get_close_matches(name, [str(key[-1]) for key in group], n=1, cutoff=0.6)
        if close:
            return "; did you mean " + " or ".join(repr(dotted(key)) for key in group if key[-1] == close[0]) + "?"
    allowed = own or [key[:1] for key in known]
    return f"; allowed here: {', '.join(dict.fromkeys(str(key[-1]) for key in allowed))}"
