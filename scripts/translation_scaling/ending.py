"""When a model is trained to its end, and how long its learning rate then falls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_CHANGE = 0.01
"""A smaller relative change of the best validation loss is none."""

LAST_PART = 0.1
"""Of the updates: the part over which it must not change."""

EXTRA = 0.2
"""Further updates at a constant rate, as a share of those before, that must not change it either."""

FEWEST_PASSES = 3.0

DECAY = 0.2
"""Updates over which the learning rate falls at the end, as a share of those at a constant rate."""

GROWTH = 1.1
"""By which factor the updates grow until the next decision."""


@dataclass(frozen=True)
class Point:
    """An evaluation at a constant learning rate.

    Attributes:
        step: updates made.
        passes: over the training pairs.
        loss: validation loss per character.
    """

    step: int
    passes: float
    loss: float


@dataclass(frozen=True)
class Verdict:
    """Whether a training is at its end.

    Attributes:
        is_ended: whether it is.
        passes: made so far.
        late_change: relative change of the best loss over the last tenth of the updates without the extra ones;
            None: too few evaluations to tell.
        extra_change: the same over the extra updates.
    """

    is_ended: bool
    passes: float
    late_change: float | None
    extra_change: float | None

    def __str__(self) -> str:
        changes = [
            f"{name} {'unknown' if value is None else f'{value:.2%}'}"
            for name, value in (("late change", self.late_change), ("change by extra updates", self.extra_change))
        ]
        return f"{self.passes:.1f} passes, {', '.join(changes)}"


def judge(curve: Sequence[Point]) -> Verdict:
    """Whether the training with this curve, in the order of the steps, may end at its last point.

    Let s be the last point's step and n = s / 1.2, so that s - n are the extra updates. The training is at its end if
    it has made 3 passes and the best loss changes by less than 1 % both from 0.9 n to n and from n to s.
    """
    if not curve:
        return Verdict(False, 0.0, None, None)
    last = curve[-1]
    end = last.step / (1 + EXTRA)
    late = _change(curve, end * (1 - LAST_PART), end)
    extra = _change(curve, end, last.step)
    is_small = all(change is not None and change < LEAST_CHANGE for change in (late, extra))
    return Verdict(is_small and last.passes >= FEWEST_PASSES - 1e-6, last.passes, late, extra)


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
    if not curve:
        raise ValueError("nothing can be expected without an evaluation")
    begin = end_of_constant_rate(curve)
    if begin is None:
        last, verdict = curve[-1], judge(curve)
        changes = [change for change in (verdict.late_change, verdict.extra_change) if change is not None]
        # The last tenth is half as long as the extra updates.
        factor = max([1.0, *(change / LEAST_CHANGE for change in changes)])
        begin = _multiple(max(last.step * factor, last.step * FEWEST_PASSES / last.passes), every)
    return end_of_decay(begin, every)


def _change(curve: Sequence[Point], before: float, after: float) -> float | None:
    """How much better the best loss until `after` is than that until `before`, relative to it.

    None: there is no evaluation up to `before`, or none between the two.
    """
    first = [point.loss for point in curve if point.step <= before]
    between = [point.loss for point in curve if before < point.step <= after]
    if not first or not between:
        return None
    best = min(first)
    return max(0.0, best - min(between)) / best


def _multiple(step: float, every: int) -> int:
    return math.ceil(round(step / every, 6)) * every
