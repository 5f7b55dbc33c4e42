"""A training to its end, in parts: at a constant rate from decision to decision, then the final decay.

Let a training have made s updates, and n = s / 1.2, so that s - n are extra ones. It is at its end if it has made 3
passes, and the best validation loss changes by less than 1 % both from 0.9 n to n and from n to s. Then the learning
rate falls to 0 over another 0.2 s updates.

Which part comes next follows from what the run's folder has: its recipe and its curve. So a run goes on wherever it was
interrupted, also on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hf_gpipe.checkpoint.directory import step_of
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import Recipe, load_recipe
from translation_scaling.curves import Point, newest_checkpoint, read_curve

RECIPE_FILE, METRICS_FILE = "recipe.yaml", "metrics.json"
LEAST_CHANGE, LAST_PART, EXTRA, FEWEST_PASSES = 0.01, 0.1, 0.2, 3.0
DECAY = 0.2
"""Updates over which the learning rate falls at the end, as a share of those at a constant rate."""

GROWTH = 1.1
"""By which factor the updates grow until the next decision."""

#: A part at a constant rate needs no translations: the validation loss decides.
_LITTLE_EVALUATION = ("evaluation.max_examples=1", "evaluation.max_new_tokens=1", "evaluation.samples=0")

#: The keys in which the parts of one run differ.
KEYS_OF_PARTS = (
    *("training.max_steps", "training.num_train_epochs", "training.decay_steps"),
    *("evaluation.max_examples", "evaluation.max_new_tokens", "evaluation.samples"),
)


class Verdict(NamedTuple):
    """Whether a training is at its end.

    Attributes:
        late_change: relative change of the best loss over the last tenth of the updates without the extra ones;
            None: too few evaluations to tell.
        extra_change: the same over the extra updates.
    """

    is_ended: bool
    passes: float
    late_change: float | None
    extra_change: float | None

    def __str__(self) -> str:
        late, extra = (
            "unknown" if change is None else f"{change:.2%}" for change in (self.late_change, self.extra_change)
        )
        return f"{self.passes:.1f} passes, late change {late}, change by extra updates {extra}"


def judge(curve: Sequence[Point]) -> Verdict:
    """Whether the training with this curve, in the order of the steps, may end at its last point."""
    if not curve:
        return Verdict(False, 0.0, None, None)
    last = curve[-1]
    end = last.step / (1 + EXTRA)
    late, extra = _change(curve, end * (1 - LAST_PART), end), _change(curve, end, last.step)
    is_small = all(change is not None and change < LEAST_CHANGE for change in (late, extra))
    return Verdict(is_small and last.passes >= FEWEST_PASSES - 1e-6, last.passes, late, extra)


def _change(curve: Sequence[Point], before: float, after: float) -> float | None:
    """How much better the best loss until `after` is than that until `before`; None: no evaluation tells."""
    first = [point.loss for point in curve if point.step <= before]
    between = [point.loss for point in curve if before < point.step <= after]
    return max(0.0, min(first) - min(between)) / min(first) if first and between else None


def end_of_constant_rate(curve: Sequence[Point]) -> int | None:
    """The step of the first point at which the training may end; None: there is none yet."""
    return next((point.step for place, point in enumerate(curve, 1) if judge(curve[:place]).is_ended), None)


def next_decision(curve: Sequence[Point], every: int) -> int:
    """The step up to which a training that may not end goes on, a multiple of the steps between evaluations."""
    last = curve[-1]
    wanted = last.step * (FEWEST_PASSES / last.passes if last.passes < FEWEST_PASSES - 1e-6 else GROWTH)
    return max(_multiple(wanted, every), _multiple(last.step + 1, every))


def end_of_decay(begin: int, every: int) -> int:
    """The last step of a training whose learning rate begins to fall after `begin` updates."""
    return _multiple(begin * (1 + DECAY), every)


def expected_end(curve: Sequence[Point], every: int) -> int:
    """The last step of a training, if the change that further updates bring falls like one over their number."""
    begin = end_of_constant_rate(curve)
    if begin is None:
        last, verdict = curve[-1], judge(curve)
        changes = [change for change in (verdict.late_change, verdict.extra_change) if change is not None]
        # The last tenth is half as long as the extra updates.
        factor = max([1.0, *(change / LEAST_CHANGE for change in changes)])
        begin = _multiple(max(last.step * factor, last.step * FEWEST_PASSES / last.passes), every)
    return end_of_decay(begin, every)


def _multiple(step: float, every: int) -> int:
    return math.ceil(round(step / every, 6)) * every


# ---------------------------------------------------------------------- the parts of a run


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


def begin_of_decay(folder: Path) -> int | None:
    """The updates before the final decay of the run in a folder; None: it is not decided yet that it comes."""
    if not (folder / RECIPE_FILE).exists():
        return None
    training = load_recipe(folder / RECIPE_FILE).training
    is_decided = training.decay_steps and training.max_steps is not None
    return training.max_steps - training.decay_steps if is_decided else None


def is_finished(folder: Path) -> bool:
    """Whether the final decay is done, and the model evaluated."""
    return (folder / METRICS_FILE).exists() and begin_of_decay(folder) is not None


def next_part(folder: Path, recipe: Recipe) -> tuple[str, ...] | None:
    """The overrides of the next start of the training command; None: the run is finished."""
    if is_finished(folder):
        return None
    points, every = read_curve(folder).points, recipe.training.eval_steps
    assert every is not None, "checked"
    if (begin := begin_of_decay(folder)) is not None:
        end = load_recipe(folder / RECIPE_FILE).training.max_steps
        assert end is not None, "decided"
        return f"training.max_steps={end}", f"training.decay_steps={end - begin}"
    if (ended_at := end_of_constant_rate(points)) is not None:
        checkpoint = newest_checkpoint(folder)
        begin = max(ended_at, step_of(checkpoint) if checkpoint is not None else 0)
        end = end_of_decay(begin, every)
        return f"training.max_steps={end}", f"training.decay_steps={end - begin}"
    until = f"training.num_train_epochs={FEWEST_PASSES}"
    steps = str(next_decision(points, every)) if points else "null"
    return until, f"training.max_steps={steps}", "training.decay_steps=0", *_LITTLE_EVALUATION
