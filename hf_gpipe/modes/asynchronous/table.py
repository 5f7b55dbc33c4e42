"""Asynchronous schedules: a window of steps without a flush between them, in which each stage updates by itself.

PipeDream (Narayanan et al. 2019, arXiv 1806.03377) starts the micro-batches of a step while those of the step before
are still on their way. So a stage's weights change between the forward and the backward of a micro-batch. A backward
reads the version of the weights that its forward has read, and the schedules differ in which version that is. Let K be
the number of stages, s from 0 to K-1 a stage, w_s(t) its weights after t updates, and one micro-batch a step:

    pipedream            weight stashing, section 3.3: the newest version on that stage.
                         w(t+1) = w(t) - lr grad f(w_0(t-K+1), w_1(t-K+2), ..., w_{K-1}(t))
    pipedream_vertical   vertical sync, section 3.3: on all stages the version that stage 0 has read.
                         w(t+1) = w(t) - lr grad f(w(t-K+1))
    pipedream_2bw        double-buffered weights (arXiv 2006.09503, section 3.1): the version before the newest version
                         of the step, w(t+1) = w(t) - lr grad f(w(t-1)). With M >= K micro-batches per step nothing
                         waits.
    pipedream_naive      no stashing, to show what stashing is good for (section 3.3): forwards read as with
                         `pipedream`, and each backward reads the newest version too, so that its gradient is not the
                         gradient of any function.

Versions below 0 are version 0: the first steps of a window have less delay. All four schedules run 1F1B. The drawings
show three stages: five steps of one micro-batch with `pipedream` (U takes no time here), and two steps of three
micro-batches with `pipedream_2bw`:

    stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- .. B3 -- .. B4 --
    stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- .. B4 -- .. ..
    stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- .. .. .. ..

    stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .. B4 -- .. B5 --
    stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .. B5 -- .. ..
    stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .. .. .. ..

Replicas of a stage take the micro-batches in turn (1F1B-RR, section 3.2). An update needs the sum of the replicas'
gradients of a step, so each replica has a G and a U for every step, and all replicas have the same versions. Each of
the r replicas of a stage has ceil(n / r) micro-batches in flight, where n is the number of workers of this stage and of
the stages after it. Without replicas this number is K-s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.basic import forwards_ahead, in_turn
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, REDUCE, UPDATE
from hf_gpipe.schedule.named import SCHEDULES, NamedSchedule
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations
from hf_gpipe.schedule.table import Schedule

Versions = Mapping[tuple[int, int], int]
"""The version that each (stage, micro-batch) reads."""


def _newest(table: Schedule) -> Versions:
    return table.newest_version


def _on_all_stages(table: Schedule) -> Versions:
    """The newest version that all stages have: that of stage 0, which is the latest one.

    Only where a step does not give every replica as many micro-batches, another stage can be later.
    """
    stages = range(table.num_stages)
    oldest = [min(table.newest_version[stage, m] for stage in stages) for m in range(table.num_micro_batches)]
    return {(stage, m): oldest[m] for stage, m in table.newest_version}


def _one_behind(table: Schedule) -> Versions:
    return {(stage, m): max(table.step_of[m] - 1, 0) for stage, m in table.newest_version}


@lru_cache(maxsize=64)
def _window(
    steps: tuple[int, ...],
    placement: Placement,
    limits: Limits,
    *,
    name: str,
    versions: Callable[[Schedule], Versions],
    waits: bool = False,
    stashes: bool = True,
) -> Schedule:
    """Write the table of a window.

    Args:
        steps: the number of micro-batches of each step.
        placement: of the stages.
        limits: of stored graphs, on each replica.
        versions: which version of the weights each forward reads, from the table in which each reads the newest.
        waits: whether a forward waits for the step before the last one (`_order`).
        stashes: as of `Schedule`.

    Raises:
        ScheduleError: a step before the last one has fewer micro-batches than a stage has replicas.
    """
    most, fewest = max(placement.replicas), min(steps[:-1], default=None)
    if fewest is not None and fewest < most:
        raise ScheduleError(
            f"schedule {name!r}: a step has {fewest} micro-batches and a stage {most} replicas: all of them take part "
            "in an update, so those without a micro-batch would hold up the others; give each step but the last at "
            f"least {most}."
        )
    orders = [
        [action for process in own for action in _order(stage, process, placement, steps, waits=waits)]
        for stage, own in enumerate(placement.workers)
    ]
    rows = [
        tuple(_with_updates(row, process, placement, steps))
        for process, row in enumerate(merge_with_recomputations(orders, placement, fused_last(limits)))
    ]
    table = Schedule(name, placement.num_stages, sum(steps), placement, tuple(rows), steps, stashes=stashes)
    read = versions(table)
    named = {(*where, version) for where, version in read.items() if version != table.newest_version[where]}
    return replace(table, versions=frozenset(named))


def _order(stage: int, process: int, placement: Placement, steps: tuple[int, ...], *, waits: bool) -> list[Action]:
    """1F1B over all steps on a worker of a stage, with as many micro-batches in flight as the module says.

    Where it waits, a forward also comes after every backward of the step before the last one, whose update makes the
    version that it reads.
    """
    own = placement.micro_batches_of(stage, process, sum(steps))
    ahead = forwards_ahead(placement, stage)
    needed = [index - ahead for index in range(len(own))]
    step_of = [step for step, size in enumerate(steps) for _ in range(size)]
    ends = list(accumulate(steps))
    for index, micro_batch in enumerate(own):
        if waits and step_of[micro_batch] > 1:
            of_steps_before = placement.micro_batches_of(stage, process, ends[step_of[micro_batch] - 2])
            needed[index] = max(needed[index], len(of_steps_before))
    forwards, backwards = ([Action(kind, stage, m) for m in own] for kind in (FORWARD, BACKWARD))
    return in_turn(forwards, backwards, partial(bisect_right, needed))


def _with_updates(row: list[Action], process: int, placement: Placement, steps: tuple[int, ...]) -> Iterator[Action]:
    """The order of a worker with U, and before it G where the stage has replicas, after the last backward of a step."""
    ends = list(accumulate(steps))
    step_of = [step for step, size in enumerate(steps) for _ in range(size)]
    num_updates = dict.fromkeys(placement.stages_of(process), 0)

    def update(stage: int) -> Iterator[Action]:
        for kind in (REDUCE, UPDATE) if placement.replicas[stage] > 1 else (UPDATE,):
            yield Action(kind, stage, step=num_updates[stage])
        num_updates[stage] += 1

    for action in row:
        yield action
        assert action.micro_batch is not None
        next_own = action.micro_batch + placement.replicas[action.stage]
        if action.kind == BACKWARD and next_own >= ends[step_of[action.micro_batch]]:
            yield from update(action.stage)
    for stage, count in num_updates.items():
        if count < len(steps):  # without a micro-batch in the last step
            yield from update(stage)


def _named(name: str, text: str, **ways: Any) -> NamedSchedule:
    return NamedSchedule(window=partial(_window, name=name, **ways), takes_groups=False, text=text)


ASYNCHRONOUS_SCHEDULES = {
    "pipedream": _named("pipedream", "asynchronous, a backward uses the weights of its forward", versions=_newest),
    "pipedream_vertical": _named("pipedream_vertical", "all stages use those of the first", versions=_on_all_stages),
    "pipedream_2bw": _named("pipedream_2bw", "the version before the last one", versions=_one_behind, waits=True),
    "pipedream_naive": _named("pipedream_naive", "a backward uses the newest", versions=_newest, stashes=False),
}
SCHEDULES.update(ASYNCHRONOUS_SCHEDULES)
