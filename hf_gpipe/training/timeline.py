"""One step of the pipeline as it was measured, beside the one that its schedule's table predicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import Batches
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import ActionKind, Costs, Span, Timeline, simulate


def measure_step(
    pipe: Pipeline, batches: Batches, repeats: int = 5, update: Callable[[], None] | None = None
) -> tuple[Timeline, Timeline]:
    """Run a training step some times and keep the one of median length.

    Every process calls it, with the same mini-batches, and gets the same result. Gradients are dropped.

    Args:
        pipe: the pipeline; its weights change only by what `update` does.
        batches: what one step trains on.
        repeats: how often it is measured, after a first time that warms up caches and connections.
        update: clips and updates, with the gradients in place; None: the step ends with its last backward. The wait for
            the slowest process before it is noted as waiting, its time as that of the stages' U.

    Returns:
        The step measured, on a clock that starts when all processes are ready; and the step predicted: the same table,
        each action taking the median of what actions of its kind took on its stage, and messages no time.
    """
    step = pipe.step
    runs = [_measure(pipe, batches, update) for _ in range(repeats + 1)]
    pipe.step = step
    everyone = pipe.topology.gather_objects(runs[1:])
    steps = [
        [
            Span(process, t.action, t.start, t.end, t.waiting, t.sending)
            for process, mine in enumerate(everyone)
            for t in mine[run]
        ]
        for run in range(repeats)
    ]
    chosen = sorted(steps, key=lambda spans: max(span.end for span in spans))[repeats // 2]
    schedule = pipe.schedule(1 + max(span.action.micro_batch or 0 for span in chosen))
    every_span = [span for spans in steps for span in spans]
    costs = Costs(
        forward_seconds=_medians(every_span, ActionKind.FORWARD, pipe.num_stages),
        recompute_seconds=_medians(every_span, ActionKind.RECOMPUTE, pipe.num_stages),
        backward_seconds=_medians(every_span, ActionKind.BACKWARD, pipe.num_stages),
        update_seconds=_medians(every_span, ActionKind.UPDATE, pipe.num_stages),
    )
    return Timeline.from_spans(schedule, chosen), simulate(schedule, costs)


def _measure(pipe: Pipeline, batches: Batches, update: Callable[[], None] | None) -> list[ActionTime]:
    """The actions of this process in one step, in seconds since all processes were ready."""
    pipe.topology.barrier()
    origin = time.perf_counter()
    times: list[ActionTime] = []
    pipe.train_on(batches, times)
    if update is not None:
        pipe.topology.barrier()
        ready = time.perf_counter()
        update()
        for device in pipe.topology.stage_devices.values():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        times = _with_update(pipe, times, ready, time.perf_counter())
    pipe.zero_grad()
    return [replace(one, start=one.start - origin, end=one.end - origin) for one in times]


def _with_update(pipe: Pipeline, times: Sequence[ActionTime], ready: float, end: float) -> list[ActionTime]:
    """The update's time as that of the stages' U, in proportion to their parameters: it updates them all at once."""
    updates = [one for one in times if one.action.kind == ActionKind.UPDATE]
    sizes = [sum(p.numel() for p in pipe.models[u.action.stage].parameters.values()) for u in updates]
    start, waiting = updates[0].start, ready - updates[-1].end
    seconds = end - start - waiting
    result = [one for one in times if one.action.kind != ActionKind.UPDATE]
    for one, size in zip(updates, sizes, strict=True):
        stop = start + waiting + seconds * size / (sum(sizes) or 1)
        result.append(ActionTime(one.action, start, stop, waiting))
        start, waiting = stop, 0.0
    return result


def _medians(spans: Sequence[Span], kind: ActionKind, num_stages: int) -> list[float]:
    """For each stage, how long an action of this kind computes; 0 where the table has none."""
    seconds: list[list[float]] = [[] for _ in range(num_stages)]
    for span in spans:
        if span.action.kind == kind:
            seconds[span.action.stage].append(float(span.computing))
    return [median(values) if values else 0.0 for values in seconds]
