"""Asynchronous schedules: a window of steps without a flush between them, in which each stage updates by itself.

PipeDream (Narayanan et al. 2019, arXiv 1806.03377) starts the micro-batches of a step while those of the step before
are still on their way. So a stage's weights change between the forward and the backward of a micro-batch. A backward
reads the version of the weights that its forward has read, and the schedules differ in which version that is. Let K be
the number of stages, s from 0 to K-1 a stage, w_s(t) its weights after t updates, and one micro-batch a step:

    pipedream            weight stashing, section 3.3: the newest version on that stage.
                         w(t+1) = w(t) - lr grad f(w_0(t-K+1), w_1(t-K+2), ..., w_{K-1}(t))
    pipedream_vertical   vertical sync, section 3.3: on all stages the version that stage 0 has read.
                         w(t+1) = w(t) - lr grad f(w(t-K+1))
    pipedream_2bw        double-buffered weights (arXiv 2006.09503, section 3.1): the version before that of the step,
                         w(t+1) = w(t) - lr grad f(w(t-1)). With M >= K micro-batches per step nothing waits.

Versions below 0 are version 0: the first steps of a window have less delay. All of them run 1F1B. K = 3, five steps of
one micro-batch with `pipedream` (U takes no time here), and two steps of three with `pipedream_2bw`:

    stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- .. B3 -- .. B4 --
    stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- .. B4 -- .. ..
    stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- .. .. .. ..

    stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .. B4 -- .. B5 --
    stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .. B5 -- .. ..
    stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .. .. .. ..
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hf_gpipe.schedule.actions import Action, ActionKind, Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations
from hf_gpipe.schedule.table import Schedule

LONGEST_WINDOW = 128
"""The most steps of a table that is run: of K stages they wait K-1 micro-batches' time at its ends."""

Versions = Mapping[tuple[int, int], int]
"""The version that each (stage, micro-batch) reads."""


def _newest(table: Schedule) -> Versions:
    return table.newest_version


def _of_first_stage(table: Schedule) -> Versions:
    return {(stage, m): table.newest_version[0, m] for stage, m in table.newest_version}


def _one_behind(table: Schedule) -> Versions:
    return {(stage, m): max(table.step_of[m] - 1, 0) for stage, m in table.newest_version}


ASYNCHRONOUS_SCHEDULES: dict[str, Callable[[Schedule], Versions]] = {
    "pipedream": _newest,
    "pipedream_vertical": _of_first_stage,
    "pipedream_2bw": _one_behind,
}
"""Which version of the weights each forward reads, from the table in which each reads the newest."""


def asynchronous(name: str, steps: tuple[int, ...], placement: Placement, limits: Limits) -> Schedule:
    """Write the table of a window.

    Args:
        name: one of `ASYNCHRONOUS_SCHEDULES`.
        steps: the number of micro-batches of each step.
        placement: of the stages, each with one replica.
        limits: of live graphs.
    """
    num_stages = placement.num_stages
    orders = [_order(stage, num_stages, steps, waits=name == "pipedream_2bw") for stage in range(num_stages)]
    rows = merge_with_recomputations(orders, placement, fused_last(limits))
    table = Schedule(name, num_stages, sum(steps), placement, tuple(_with_updates(row, steps) for row in rows), steps)
    found = ASYNCHRONOUS_SCHEDULES[name](table)
    named = {(*where, version) for where, version in found.items() if version != table.newest_version[where]}
    return replace(table, versions=frozenset(named))


def _order(stage: int, num_stages: int, steps: tuple[int, ...], *, waits: bool) -> list[Action]:
    """1F1B over all steps: a forward comes after so many backwards that K-s micro-batches are in flight.

    Args:
        stage: s.
        num_stages: K.
        steps: the number of micro-batches of each step.
        waits: whether a forward also comes after every backward of the step before the last one, whose update makes the
            version that it reads.
    """
    order: list[Action] = []
    num_backwards, first, first_of_last = 0, 0, 0
    for size in steps:
        for micro_batch in range(first, first + size):
            needed = max(micro_batch - (num_stages - stage) + 1, first_of_last if waits else 0)
            while num_backwards < needed:
                order.append(Action(ActionKind.BACKWARD, stage, num_backwards))
                num_backwards += 1
            order.append(Action(ActionKind.FORWARD, stage, micro_batch))
        first_of_last, first = first, first + size
    return order + [Action(ActionKind.BACKWARD, stage, m) for m in range(num_backwards, first)]


def _with_updates(row: list[Action], steps: tuple[int, ...]) -> tuple[Action, ...]:
    """The order of a process with each stage's U directly after the last backward of a step."""
    last = {sum(steps[: step + 1]) - 1: step for step in range(len(steps))}
    result: list[Action] = []
    for action in row:
        result.append(action)
        if action.kind == ActionKind.BACKWARD and (step := last.get(action.micro_batch or 0)) is not None:
            result.append(Action(ActionKind.UPDATE, action.stage, step=step))
    return tuple(result)
