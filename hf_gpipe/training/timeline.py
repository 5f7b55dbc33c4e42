"""One step of the pipeline as it was measured, beside the one that its schedule's table predicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import Batches
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import ActionKind, Costs, Span, Timeline, simulate


def measure_step(pipe: Pipeline, batches: Batches, repeats: int = 5) -> tuple[Timeline, Timeline]:
    """Run a training step some times, without an update, and keep the one of median length.

    Every process calls it, with the same mini-batches, and gets the same result. Gradients are dropped.

    Returns:
        The step measured, on a clock that starts when all processes are ready; and the step predicted: the same table,
        each action taking the median of what actions of its kind took on its stage, and messages no time.
    """
    step = pipe.step
    runs: list[list[ActionTime]] = []
    # The first run warms up caches and connections.
    for _ in range(repeats + 1):
        pipe.topology.barrier()
        origin = time.perf_counter()
        times: list[ActionTime] = []
        pipe.train_on(batches, times)
        pipe.zero_grad()
        runs.append([ActionTime(t.action, t.start - origin, t.end - origin) for t in times])
    pipe.step = step
    everyone = pipe.topology.gather_objects(runs[1:])
    steps = [
        [Span(process, t.action, t.start, t.end) for process, mine in enumerate(everyone) for t in mine[run]]
        for run in range(repeats)
    ]
    chosen = sorted(steps, key=lambda spans: max(span.end for span in spans))[repeats // 2]
    num_micro_batches = sum(min(pipe.num_micro_batches, len(next(iter(batch.values())))) for batch in batches)
    schedule = pipe.schedule(num_micro_batches)
    every_span = [span for spans in steps for span in spans]
    costs = Costs(
        forward_seconds=_medians(every_span, ActionKind.FORWARD, pipe.num_stages),
        recompute_seconds=_medians(every_span, ActionKind.RECOMPUTE, pipe.num_stages),
        backward_seconds=_medians(every_span, ActionKind.BACKWARD, pipe.num_stages),
        update_seconds=_medians(every_span, ActionKind.UPDATE, pipe.num_stages),
    )
    return Timeline.from_spans(schedule, chosen), simulate(schedule, costs)


def _medians(spans: Sequence[Span], kind: ActionKind, num_stages: int) -> list[float]:
    """For each stage, how long an action of this kind takes; 0 where the table has none."""
    seconds: list[list[float]] = [[] for _ in range(num_stages)]
    for span in spans:
        if span.action.kind == kind:
            seconds[span.action.stage].append(float(span.busy))
    return [median(values) if values else 0.0 for values in seconds]
