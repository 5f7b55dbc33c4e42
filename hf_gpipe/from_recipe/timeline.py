"""One step of the pipeline as it was measured, beside the one that its schedule's table predicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import cast

from hf_gpipe.pipeline import Pipeline, Update, UpdateStage
from hf_gpipe.runtime.batches import Batches
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Costs, Span, Timeline, simulate
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import KINDS, Resource
from hf_gpipe.schedule.updates import updates_beside, with_updates_last


def measure_step(
    pipe: Pipeline,
    batches: Batches,
    repeats: int = 5,
    update: Update | UpdateStage | None = None,
    update_beside: Callable[[int], None] | None = None,
) -> tuple[Timeline, Timeline]:
    """Run a training step some times and keep the one of median length.

    Every process calls it, with the same mini-batches, and gets the same result. Gradients are dropped. Of a
    schedule with windows a window of twice as many steps as stages is run, each on these mini-batches.

    Args:
        pipe: the pipeline; its weights change only by what `update` does.
        batches: what one step trains on.
        repeats: how often it is measured, after a first time that warms up caches and connections.
        update: what U does, as of `Pipeline.train_step` or `Pipeline.train_window`; None: nothing. The wait for the
            slowest process before it is noted as waiting. The last U of a process updates all its stages.
        update_beside: what H does, as `update_stage` of `Pipeline.train_ahead`; None: the table has U.

    Returns:
        The step measured, on a clock that starts when all processes are ready; and the step predicted: the same table,
        each action taking the median of what actions of its kind took on its stage, and messages no time.
    """
    runs = [_measure(pipe, batches, update, update_beside) for _ in range(repeats + 1)]
    # An action travels as its text.
    mine = [[(str(t.action), t.start, t.end, t.waiting, t.sending) for t in run] for run in runs[1:]]
    everyone, placement = pipe.world.gather_objects(mine), pipe.world.placement
    # The ranks of a worker run the same row.
    of_workers = [everyone[placement.ranks_of(worker)[0]] for worker in range(placement.num_processes)]
    steps = [
        [
            Span(process, Action.parse(action), *times)
            for process, own in enumerate(of_workers)
            for action, *times in own[run]
        ]
        for run in range(repeats)
    ]
    chosen = sorted(steps, key=lambda spans: max(span.end for span in spans))[repeats // 2]
    total, num_steps = 1 + max(span.action.micro_batch or 0 for span in chosen), _num_steps(pipe)
    schedule = pipe.schedule([total // num_steps] * num_steps if pipe.runs_windows else total)
    schedule = (None if update_beside is None else updates_beside(schedule)) or with_updates_last(schedule)
    every_span = [span for spans in steps for span in spans]
    computing: dict[str, list[list[float]]] = {kind: [[] for _ in range(pipe.num_stages)] for kind in KINDS}
    for span in every_span:
        if span.action.kind.resource in (Resource.COMPUTE, Resource.HOST):
            computing[span.action.kind][span.action.stage].append(float(span.computing))
    costs = Costs.from_kinds(
        {kind: [median(own) if own else 0.0 for own in computing[kind]] for kind in KINDS.values()}
    )
    return Timeline.from_spans(schedule, chosen), simulate(schedule, costs)


def _measure(
    pipe: Pipeline,
    batches: Batches,
    update: Update | UpdateStage | None,
    update_beside: Callable[[int], None] | None,
) -> list[ActionTime]:
    """The actions of this process in one step or window, in seconds since all processes were ready."""
    pipe.world.barrier()
    origin = time.perf_counter()
    times: list[ActionTime] = []
    step = pipe.step
    if pipe.runs_windows:
        of_stage = cast(UpdateStage, update) if update is not None else lambda stage, step, norm: None
        pipe.train_window([batches] * _num_steps(pipe), of_stage, times)
    else:
        pipe.train_on(batches, times, cast(Update | None, update), update_beside)
        pipe.zero_grad()
    # It does not count.
    pipe.step = step
    return [replace(t, start=t.start - origin, end=t.end - origin) for t in times]


def _num_steps(pipe: Pipeline) -> int:
    return 2 * pipe.num_stages if pipe.runs_windows else 1
