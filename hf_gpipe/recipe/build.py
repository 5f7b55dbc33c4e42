"""Builds a recipe from a mapping of sections: every key must exist and every value must fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hf_gpipe.errors import RecipeError, UserError, nearest
from hf_gpipe.recipe.fields import SECTIONS, Recipe, all_keys, recipe_of, sections_of
from hf_gpipe.recipe.strict_yaml import KeyPath, Locations, read
from hf_gpipe.settings.kinds import uses
from hf_gpipe.settings.section import MisfitError, dotted, keys_of
from hf_gpipe.text import shorten, show


def build(data: Mapping[Any, Any], locations: Locations) -> Recipe:
    """Build the recipe from a mapping of sections; a section or key that is absent or null gets its default.

    A key with nothing after it, as an empty variable of a shell makes it, is an error.

    Raises:
        RecipeError: an unknown key, a required key that is missing, a value of the wrong type or out of range, or
            values of a section that contradict each other; the message has the place, the key, what was found and
            what is allowed.
    """
    sections = sections_of(kind_of(data))
    for key in data:
        if key not in sections:
            raise RecipeError(f"{locations.of((key,))}: {key} is not a key of a recipe{_hint((key,))}")
    return recipe_of({name: _section(name, cls, data.get(name), locations) for name, cls in sections.items()})


def drop_unused(data: Mapping[Any, Any], kind: object, keep: Iterable[KeyPath] = ()) -> None:
    """Remove from the sections, in place, the keys that a kind of data does not use, except those in `keep`."""
    kept = set(keep)
    for name, key in all_keys():
        section = data.get(name)
        if isinstance(section, dict) and not uses(kind, key.kinds) and not {(name,), (name, key.name)} & kept:
            section.pop(key.name, None)


def kind_of(data: Mapping[Any, Any]) -> object:
    """`data.kind` of a recipe that has not been checked yet; None if it is missing."""
    section = data.get("data")
    return section.get("kind") if isinstance(section, dict) else None


def apply_overrides(data: object, overrides: Iterable[str], locations: Locations) -> list[KeyPath]:
    """Write each `key=value` into `data`, a mapping of mappings; the value is YAML, the key dotted.

    An override replaces the value at its key, and later overrides replace earlier ones.

    Returns:
        The keys that were given.

    Raises:
        RecipeError: text that is not `key=value`, a value that is not YAML, or a key below a value that is not a
            mapping.
    """
    given: list[KeyPath] = []
    for override in overrides:
        place = f"override {shorten(repr(override))}"
        key, equals, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not equals or not all(path):
            raise RecipeError(f"{place}: expected key=value, for example pipeline.num_stages=4.")
        value, _ = read(text, place)
        locations.replace(_set(data, path, value, place), place)
        if not text.strip():
            locations.blank.add(path)
        given.append(path)
    return given


def _section(name: str, cls: type, values: object, locations: Locations) -> Any:
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise RecipeError(f"{locations.of((name,))}: {name} must be a mapping of keys to values, found {show(values)}.")
    for key in values:
        if key not in keys_of(cls):
            unknown = (name, key)
            raise RecipeError(f"{locations.of(unknown)}: {name}.{key} is not a key of a recipe{_hint(unknown)}")
    keys = keys_of(cls)
    given = {
        key: value
        for key, value in values.items()
        if value is not None or keys[key].keeps_null or (name, key) in locations.blank
    }
    try:
        return cls(**given)
    except MisfitError as error:
        path = (name, *error.path)
        place = locations.of(path) if error.path[0] in values else locations.source
        raise RecipeError(f"{place}: {dotted(path)}{error.what}") from None
    except UserError as error:
        raise RecipeError(f"{locations.source}: {name}.{error}") from None


def _set(data: object, path: KeyPath, value: Any, place: str) -> KeyPath:
    """Write `value` at `path`, and mappings that are missing on the way; return the shortest path that was written."""
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


def _hint(path: KeyPath) -> str:
    """A hint for an unknown key: the same key in another section, or the nearest name, of its own section first."""
    known = [(name, key.name) for name, key in all_keys()]
    section, name = path[:-1], str(path[-1])
    if name in {dotted(key) for key in known}:
        return f"; in a file a dot is a level: write {name.rpartition('.')[2]!r} below {name.rpartition('.')[0]!r}"
    own = [key for key in known if key[:-1] == section]
    if section == ("model",) and not nearest(name, [key[-1] for key in own]):
        return f"; a field of the model's configuration stands below model.config: model.config.{name}"
    same_name = [key for key in known if key[-1] == name]
    near_section = "" if section or same_name else nearest(name, SECTIONS)
    if near_section:
        return near_section
    for group in (same_name, own, known):
        close = difflib.get_close_matches(name, [key[-1] for key in group], n=1, cutoff=0.6)
        if close:
            return "; did you mean " + " or ".join(repr(dotted(key)) for key in group if key[-1] == close[0]) + "?"
    allowed = [key[-1] for key in own] or list(SECTIONS)
    return f"; allowed here: {', '.join(allowed)}"
