"""Which runs there are, and how far each has come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_gpipe.checkpoint.directory import step_of
from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.recipe.fields import all_keys
from translation_scaling import to_end
from translation_scaling.curves import read_curve
from translation_scaling.to_end import METRICS_FILE, RECIPE_FILE

LOG_FILE, STARTS_FILE = "run.log", "starts.jsonl"

EXIT_USER_ERROR = 2
"""Of the training command: the recipe or its data are wrong, and nothing was trained."""

#: What the script decides for each run.
_OWN_KEYS = {"training.seed": "--seeds", "training.output_dir": "--output"}

Progress = Literal["finished", "begun", "new", "other"]
"""`begun`: interrupted, or it runs now; `other`: the folder has a run of another recipe."""


@dataclass(frozen=True)
class Run:
    """One training: a recipe with a seed.

    Attributes:
        recipe: its file.
        seed: training.seed.
        overrides: key=value.
        output: folder of all runs.
        label: its name in the report; None: the recipe's.
        to_end: whether it trains until it is at its end; otherwise the recipe says how long.
        sweep: short runs with other learning rates, of which the best one's is taken; without any, the recipe's is.
        rate_factor: how much larger the rate is than the sweep's, for a run with other mini-batches than its sweep.
    """

    recipe: Path
    seed: int
    overrides: tuple[str, ...]
    output: Path
    label: str | None = None
    to_end: bool = False
    sweep: tuple[Run, ...] = ()
    rate_factor: float = 1.0

    @property
    def name(self) -> str:
        """As the report has it."""
        return self.label or self.recipe.stem

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return folder_of(self.output, self.name, self.seed)

    @property
    def arguments(self) -> list[str]:
        """Of `hf-gpipe train`."""
        own = [f"training.seed={self.seed}", f"training.output_dir={json.dumps(str(self.folder))}"]
        rate = self.swept_rate
        return [str(self.recipe), *([] if rate is None else [f"training.learning_rate={rate}"]), *self.overrides, *own]

    @property
    def swept_rate(self) -> float | None:
        """The rate with the best validation loss of the sweep, by the factor; None: the recipe's own is taken.

        Where no run of the sweep has been evaluated, as in a folder that has the finished runs alone, a run that has
        begun keeps its rate.
        """
        losses = {run: best.loss for run in self.sweep if (best := read_curve(run.folder).best) is not None}
        if not losses:
            return self._begun_rate if self.sweep else None
        return self.rate_factor * min(losses, key=losses.__getitem__).resolved().training.learning_rate

    @property
    def _begun_rate(self) -> float | None:
        """The learning rate that the run has begun with; None: it has not begun."""
        try:
            return load_recipe(self.folder / RECIPE_FILE).training.learning_rate
        except RecipeError:
            return None

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.seed

    def next_arguments(self) -> list[str] | None:
        """The arguments of the next start of the training command; None: the run is finished."""
        if not self.to_end:
            return None if self.progress()[0] == "finished" else self.arguments
        part = to_end.next_part(self.folder, self.resolved())
        return None if part is None else [*self.arguments, *part]

    def resolved(self) -> Recipe:
        """Raises RecipeError where the recipe or an override is wrong."""
        return load_recipe(self.recipe, self.arguments[1:])

    def progress(self) -> tuple[Progress, str]:
        """How far it has come, and one more word about it."""
        if not (self.folder / RECIPE_FILE).exists():
            return "new", ""
        changed = changed_keys(self.folder / RECIPE_FILE, self.resolved())
        if self.to_end:
            changed = [key for key in changed if key not in to_end.KEYS_OF_PARTS]
        if changed:
            return "other", f"{self.folder} has a run of another recipe, which differs in {', '.join(changed[:4])}"
        if to_end.is_finished(self.folder) if self.to_end else (self.folder / METRICS_FILE).exists():
            return "finished", ""
        steps = [step_of(path) for path in self.folder.glob("checkpoint-*")]
        return "begun", f"resumes from step {max(steps)}" if steps else "no checkpoint yet"


def folder_of(output: Path, name: str, seed: int) -> Path:
    """Where a run's results are."""
    return output / name / f"seed-{seed}"


def plan_runs(
    recipes: Sequence[Path], seeds: Sequence[int], overrides: Sequence[str], output: Path, *, to_end: bool = False
) -> list[Run]:
    """All runs, in an order that ends a seed of all recipes before the next seed begins.

    Raises:
        UserError: recipes of one name, a seed twice, an override of what the script decides, a recipe that is wrong
            or has no translation to compare.
    """
    names = [recipe.stem for recipe in recipes]
    if len(set(names)) < len(names):
        raise UserError(f"the recipes {', '.join(map(str, recipes))} have not each a name of their own; rename one")
    if len(set(seeds)) < len(seeds) or not all(seed >= 0 for seed in seeds):
        raise UserError(f"--seeds {' '.join(map(str, seeds))}: give each seed once, none below 0")
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in _OWN_KEYS:
            raise UserError(f"override {override!r}: this script sets {key} of each run; use {_OWN_KEYS[key]}")
    runs = [Run(recipe, seed, tuple(overrides), output, to_end=to_end) for seed in seeds for recipe in recipes]
    for run in runs[: len(recipes)]:
        check_run(run)
    return runs


def check_run(run: Run) -> None:
    """Raise UserError if a run's recipe is wrong, has no translations to compare, or cannot be trained to its end."""
    recipe = run.resolved()
    if recipe.data.kind == "text":
        raise UserError(
            f"{run.recipe}: data.kind is text, and translations are compared here; give recipes with pairs, or "
            "train this one by hf-gpipe train"
        )
    if run.to_end:
        to_end.check(recipe, str(run.recipe))


def changed_keys(written: Path, wanted: Recipe) -> list[str]:
    """The keys in which the recipe of a run differs from the one wanted, but for where its results go."""
    try:
        before = flat(load_recipe(written))
    except RecipeError:
        return ["keys that this version does not read"]
    return [key for key in differing_keys(before, flat(wanted)) if key != "training.output_dir"]


def differing_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys of two flat recipes that have not the same value in both, or stand in one alone."""
    keys = dict.fromkeys((*after, *before))
    return [key for key in keys if (key in before, before.get(key)) != (key in after, after.get(key))]


def flat(recipe: Recipe) -> dict[str, Any]:
    """A recipe's values by their dotted keys; those of the model's configuration too."""
    values: dict[str, Any] = {}
    for section, key in all_keys():
        value = key.value_in(getattr(recipe, section))
        if (section, key.name) == ("model", "config"):
            values |= {f"model.config.{name}": entry for name, entry in value.items()}
        else:
            values[f"{section}.{key.name}"] = value
    return values


def starts(folder: Path) -> list[dict[str, float]]:
    """Each start of a run's command: when, how many seconds it took, and its exit code."""
    path = folder / STARTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wall_seconds(folder: Path) -> float:
    """Of all starts of a run's command, imports and evaluation included, but for those that were refused."""
    return sum(start["seconds"] for start in starts(folder) if start["exit_code"] != EXIT_USER_ERROR)
