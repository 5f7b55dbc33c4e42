"""A training to its end, in parts: at a constant rate from decision to decision, then the final decay.

Which part comes next follows from what the run's folder has. So a run goes on wherever it was interrupted, also on
another machine, and also if nothing but a checkpoint is left of it.
"""

from __future__ import annotations

from pathlib import Path

from hf_gpipe.checkpoint.directory import step_of
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import Recipe, load_recipe
from translation_scaling import ending
from translation_scaling.curves import Curve, max_steps_of, newest_checkpoint, read_curve, restore_curve

RECIPE_FILE, METRICS_FILE = "recipe.yaml", "metrics.json"

#: A part at a constant rate needs no translations: the validation loss decides.
_LITTLE_EVALUATION = ("evaluation.max_examples=1", "evaluation.max_new_tokens=1", "evaluation.samples=0")

#: The keys in which the parts of one run differ.
KEYS_OF_PARTS = (
    *("training.max_steps", "training.num_train_epochs", "training.decay_steps"),
    *("evaluation.max_examples", "evaluation.max_new_tokens", "evaluation.samples"),
)


def check(recipe: Recipe, name: str) -> None:
    """Raise UserError if a recipe cannot be trained to its end."""
    if recipe.training.lr_scheduler_type != "warmup_stable_decay":
        raise UserError(
            f"{name}: training.lr_scheduler_type is {recipe.training.lr_scheduler_type}, and a training to its end "
            "needs warmup_stable_decay; set it"
        )
    for key in ("eval_steps", "save_steps"):
        if getattr(recipe.training, key) is None:
            raise UserError(f"{name}: training.{key} is null, and a training to its end needs it; set it")


def begin_of_decay(folder: Path, curve: Curve) -> int | None:
    """The updates before the final decay of the run in a folder; None: it is not decided yet that it comes."""
    if (folder / RECIPE_FILE).exists():
        training = load_recipe(folder / RECIPE_FILE).training
        if training.decay_steps and training.max_steps is not None:
            return training.max_steps - training.decay_steps
        return None
    checkpoint = newest_checkpoint(folder)
    return None if checkpoint is None else curve.begin_of_decay(max_steps_of(checkpoint))


def is_finished(folder: Path) -> bool:
    """Whether the final decay is done, and the model evaluated."""
    curve = read_curve(folder)
    return (folder / METRICS_FILE).exists() and begin_of_decay(folder, curve) is not None


def next_part(folder: Path, recipe: Recipe) -> tuple[str, ...] | None:
    """The overrides of the next start of the training command; None: the run is finished."""
    if is_finished(folder):
        return None
    restore_curve(folder)
    curve, every = read_curve(folder), recipe.training.eval_steps
    assert every is not None, "checked"
    begin = begin_of_decay(folder, curve)
    if begin is not None:
        end = _end_of(folder, begin, every)
        return f"training.max_steps={end}", f"training.decay_steps={end - begin}"
    points = curve.points
    ended_at = ending.end_of_constant_rate(points)
    if ended_at is not None:
        checkpoint = newest_checkpoint(folder)
        begin = max(ended_at, step_of(checkpoint) if checkpoint is not None else 0)
        end = ending.end_of_decay(begin, every)
        return f"training.max_steps={end}", f"training.decay_steps={end - begin}"
    until = f"training.num_train_epochs={ending.FEWEST_PASSES}"
    steps = "null" if not points else str(ending.next_decision(points, every))
    return until, f"training.max_steps={steps}", "training.decay_steps=0", *_LITTLE_EVALUATION


def _end_of(folder: Path, begin: int, every: int) -> int:
    """The last update of a run whose final decay was decided."""
    if (folder / RECIPE_FILE).exists():
        written = load_recipe(folder / RECIPE_FILE).training.max_steps
        assert written is not None, "parts of a decay have it"
        return written
    return ending.end_of_decay(begin, every)
