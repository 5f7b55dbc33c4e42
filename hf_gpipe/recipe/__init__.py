"""A recipe: typed sections, filled from strict YAML, then from key=value overrides. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe.build import apply_overrides, fill
from hf_gpipe.recipe.check import check
from hf_gpipe.recipe.fields import (
    DataSection,
    EvaluationSection,
    ModelSection,
    PipelineSection,
    Recipe,
    TokenizerSection,
    TrainingSection,
)
from hf_gpipe.recipe.help import recipe_help
from hf_gpipe.recipe.strict_yaml import read
from hf_gpipe.recipe.typed import show

__all__ = [
    "DataSection",
    "EvaluationSection",
    "ModelSection",
    "PipelineSection",
    "Recipe",
    "TokenizerSection",
    "TrainingSection",
    "check",
    "load_recipe",
    "parse_recipe",
    "recipe_help",
]


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The checked recipe of a YAML file, after its overrides.

    Args:
        path: the file.
        overrides: `key=value` each, the key dotted and the value YAML: "pipeline.num_stages=4".

    Raises:
        RecipeError: the file is missing or no UTF-8 text, and whatever `parse_recipe` refuses.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(f"recipe {path} does not exist (looked in {Path.cwd()}); correct the path.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 text ({error.reason}, byte {error.start}).") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"recipe {str(path)!r} cannot be read: {error}.") from error
    return parse_recipe(text, overrides, source=str(path))


def parse_recipe(text: str, overrides: Iterable[str] = (), *, source: str = "recipe") -> Recipe:
    """The checked recipe of a YAML text, after its overrides; `source` names the text in messages.

    Raises:
        RecipeError: text that is no YAML mapping, a malformed override, an unknown or missing key, a value of the
            wrong type or out of range, or fields that contradict each other.
    """
    data, locations = read(text, source)
    if not isinstance(data, dict):
        raise RecipeError(f"{source}: a recipe must be a mapping of sections, such as `model:`; found {show(data)}.")
    apply_overrides(data, overrides, locations)
    recipe = fill(Recipe, data, locations)
    try:
        check(recipe)
    except RecipeError as error:
        raise RecipeError(f"{source}: {error}") from error
    return recipe
