"""A recipe's file with the files that it extends: `extends: base.yaml` at its top, a path relative to the file.

The base is read first and the file's own keys replace its keys. Nested mappings are merged key by key, so that a
derived recipe states only its differences; a list or a single value replaces the base's. If the file changes data.kind,
the base's keys that the new kind does not use are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe.build import drop_unused, kind_of
from hf_gpipe.recipe.strict_yaml import LONGEST, KeyPath, Locations, read_mapping
from hf_gpipe.text import show

EXTENDS = "extends"
LONGEST_CHAIN = 8
"""The most files in a chain, the recipe itself included; a longer one is probably a mistake."""


def read_with_bases(path: str | Path) -> tuple[dict[Any, Any], Locations]:
    """Read a recipe's file merged with the files that it extends; also return the file and line of each value.

    Raises:
        RecipeError: a file that is missing or is not UTF-8 text or a YAML mapping; files that extend each other in a
            circle; a chain of more than LONGEST_CHAIN files.
    """
    return _read(Path(path), f"recipe {path}", ())


def refuse_extends(data: dict[Any, Any], locations: Locations) -> None:
    """Raise RecipeError if `extends` stands in an override, or in a recipe that was not read from a file."""
    if EXTENDS in data:
        raise RecipeError(
            f"{locations.of((EXTENDS,))}: {EXTENDS} is allowed only at the top of a recipe's file, because its path "
            "is relative to that file; write it there, and read the recipe with load_recipe."
        )


def _read(path: Path, name: str, chain: Sequence[Path]) -> tuple[dict[Any, Any], Locations]:
    """Read one file merged over its bases.

    Args:
        path: the file.
        name: the beginning of messages about the file itself.
        chain: the files that extend it.
    """
    data, locations = read_mapping(_text(path, name), str(path))
    chain = [*chain, path]
    if EXTENDS in data:
        base = _base(data.pop(EXTENDS), path, locations, chain)
        inherited, places = _read(base, f"{locations.of((EXTENDS,))}: {EXTENDS}: {base}", chain)
        if kind_of(data) not in (None, kind_of(inherited)):
            drop_unused(inherited, kind_of(data))
        _inherit(data, locations, inherited, places, ())
        locations.forget((EXTENDS,))
    return data, locations


def _base(value: object, path: Path, locations: Locations, chain: Sequence[Path]) -> Path:
    """The file that `path` extends."""
    place = f"{locations.of((EXTENDS,))}: {EXTENDS}"
    # Messages quote a line of a file that is no recipe: it must not be a file of passwords.
    if not isinstance(value, str) or not value.endswith((".yaml", ".yml")):
        raise RecipeError(
            f"{place}: {show(value)} is no recipe; give a file that ends in .yaml or .yml, such as base.yaml, by its "
            "path from this file."
        )
    base = path.parent / value
    try:
        circle = base.resolve() in {file.resolve() for file in chain}
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(f"{place}: {value!r} is not a valid path: {error}.") from error
    files = " -> ".join(str(file) for file in [*chain, base])
    if circle:
        raise RecipeError(f"{place}: the recipes extend each other in a circle, {files}; remove one of these.")
    if len(chain) == LONGEST_CHAIN:
        raise RecipeError(
            f"{place}: {len(chain) + 1} recipes extend each other in a row, {files}; at most {LONGEST_CHAIN} are "
            "allowed: merge some of them."
        )
    return base


def _text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            # Bytes that are cut in the middle of a character are too many anyhow. What is no regular file may not end.
            content = file.read(4 * LONGEST + 1)
        if len(content) > 4 * LONGEST:
            raise RecipeError(f"{name} is no recipe: it has more than {4 * LONGEST} bytes.")
        return content.decode("utf-8-sig")
    except RecipeError:
        raise
    except FileNotFoundError as error:
        raise RecipeError(f"{name} does not exist (looked in {Path.cwd()}); correct the path.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name} is not UTF-8 text ({error.reason}, byte {error.start}).") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"{name} cannot be read: {error}.") from error


def _inherit(
    own: dict[Any, Any], places: Locations, base: dict[Any, Any], base_places: Locations, path: KeyPath
) -> None:
    """Copy into `own` the values that only `base` has; `path` is the path of both in the recipe."""
    for key, value in base.items():
        here = (*path, key)
        # An empty section inherits everything; at a deeper level null is a value.
        if key not in own or (own[key] is None and not path):
            own[key] = value
            places.take(base_places, here)
        elif isinstance(own[key], dict) and isinstance(value, dict):
            _inherit(own[key], places, value, base_places, here)
