"""A recipe: typed sections, filled from strict YAML, then from key=value overrides. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe.build import apply_overrides, build, drop_unused, kind_of
from hf_gpipe.recipe.check import check
from hf_gpipe.recipe.data import DataSection as DataSection
from hf_gpipe.recipe.extends import read_with_bases, refuse_extends
from hf_gpipe.recipe.fields import ModelSection as ModelSection
from hf_gpipe.recipe.fields import Recipe
from hf_gpipe.recipe.fields import TokenizerSection as TokenizerSection
from hf_gpipe.recipe.fields import may_change as may_change
from hf_gpipe.recipe.help import recipe_help as recipe_help
from hf_gpipe.recipe.help import section_help as section_help
from hf_gpipe.recipe.strict_yaml import Locations, read_mapping
from hf_gpipe.recipe.training import TrainingSection as TrainingSection

#: Recipes are passed on, and reading or planning one must not run code that its author names.
_TRUST = ("model", "trust_remote_code")
_NO_STEPS = (
    "process rewards are gone: leave it out, and give each step as a row of data.kind classification, with the answer "
    "up to the step as its text"
)
#: Keys of earlier versions -> what to do instead.
_REMOVED = {
    ("training", "memory_save_steps"): "write save_steps",
    ("pipeline", "sequence_parallel"): "leave it out",
    ("distillation", "top_k_file"): "leave it out, and name the teacher as distillation.teacher, which runs beside",
    ("data", "step_separator"): _NO_STEPS,
    ("data", "last_step_only"): _NO_STEPS,
}


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from a YAML file and the files that it extends, apply the overrides, and check it.

    Args:
        path: the file.
        overrides: `key=value` each, the key dotted and the value YAML: "pipeline.num_stages=4".

    Raises:
        RecipeError: a file is missing or is not UTF-8 text, files extend each other in a circle, or any error of
            `parse_recipe`.
    """
    data, locations = read_with_bases(path)
    return _recipe(data, locations, overrides)


def parse_recipe(text: str, overrides: Iterable[str] = (), *, source: str = "recipe") -> Recipe:
    """Read a recipe from YAML text, apply the overrides, and check it; `source` names the text in messages.

    Raises:
        RecipeError: text that is not a YAML mapping, `extends` (its path is relative to a file), a malformed override,
            an unknown or missing key, a value of the wrong type or out of range, a key that the kind of data does not
            use, fields that contradict each other, or `model.trust_remote_code` that no override allows.
    """
    data, locations = read_mapping(text, source)
    return _recipe(data, locations, overrides)


def load_saved(path: str | Path) -> Recipe:
    """Load the recipe that a run saved in its output directory.

    An earlier version may have written keys that the kind of data does not use, or keys that are no more; they are
    dropped.
    """
    data, locations = read_with_bases(path)
    drop_unused(data, kind_of(data))
    for section, key in _REMOVED:
        if isinstance(values := data.get(section), dict):
            values.pop(key, None)
    return _recipe(data, locations, (), runs=False)


def _recipe(data: dict[Any, Any], locations: Locations, overrides: Iterable[str], *, runs: bool = True) -> Recipe:
    """Build and check a recipe. One that is only compared (not `runs`) may trust code."""
    kind = kind_of(data)
    given = apply_overrides(data, overrides, locations)
    if kind_of(data) != kind:
        drop_unused(data, kind_of(data), keep=given)
    refuse_extends(data, locations)
    _refuse_removed(data, locations)
    recipe = build(data, locations)
    check(recipe, locations)
    if runs and recipe.model.trust_remote_code and not {_TRUST, _TRUST[:1]} & set(given):
        raise RecipeError(
            f"{locations.of(_TRUST)}: {'.'.join(_TRUST)} is true, so Python code that comes with the model would run, "
            f"and a file cannot allow that; read the code, then add {'.'.join(_TRUST)}=true to the command."
        )
    return recipe


def _refuse_removed(data: dict[Any, Any], locations: Locations) -> None:
    """Raise RecipeError for what earlier versions had, with what to do instead."""
    for (section, key), advice in _REMOVED.items():
        if isinstance(values := data.get(section), dict) and key in values:
            place = locations.of((section, key))
            raise RecipeError(f"{place}: {section}.{key} is not a key of a recipe any more: {advice}.")
    if kind_of(data) == "process_rewards":
        raise RecipeError(f"{locations.of(('data', 'kind'))}: data.kind is process_rewards: {_NO_STEPS}.")
