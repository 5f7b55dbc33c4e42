"""The tensors that stages hold over time: one sweep over a timeline behind every count of live tensors.

A micro-batch's input comes when the stage before sends it and stays until the stage's last action on the micro-batch.
Its autograd graph is there from the end of the forward or recomputation that makes it to the end of the backward. A
gradient that comes early waits for its backward to begin. Where the backward is split, the input and the graph stay
until the end of I, and what W needs from then to the end of W.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

from hf_gpipe.schedule.actions import ActionKind
from hf_gpipe.schedule.simulate import Costs, Seconds, Span, Timeline, simulate
from hf_gpipe.schedule.table import Schedule


class Held(StrEnum):
    """Things that a stage holds for a while."""

    MICRO_BATCH = "micro-batch"
    """From its forward to its last action, both included."""
    INPUT = "input"
    """The tensors received from the stage before."""
    GRAPH = "graph"
    GRADIENT = "gradient"
    """The gradient received from the stage after, while it waits for its backward."""
    DEFERRED = "deferred"
    """What W needs: inputs and output gradients of linear layers, from the end of I to the end of W."""
    FORWARD_ONLY = "forward only"
    """Working memory of a forward without a graph, while it runs; the next three are alike."""
    FORWARD = "forward"
    """Or the recomputation that makes the graph."""
    BACKWARD = "backward"
    """Or I."""
    WEIGHT = "weight gradient"
    """W."""
    FIRST_BACKWARD = "first backward"
    """The extra memory of the stage's first B or W, which makes the gradients of the weights."""
    WEIGHT_GRADIENTS = "gradients of weights"
    """From the end of the first B or W on."""

    __hash__ = str.__hash__


def holdings(timeline: Timeline, stage: int, process: int) -> Iterator[tuple[Held, Seconds, Seconds]]:
    """Yield the things that a stage holds in one of its workers for each micro-batch: (what, from, until)."""
    schedule, ran = timeline.schedule, timeline.spans_of
    own = ran[stage]
    before = ran[stage - 1] if stage else None
    after = ran[stage + 1] if stage + 1 < len(ran) else None
    completed = [span for (kind, _), span in own.items() if kind.completes_micro_batch and span.process == process]
    first_completed = min(completed, key=lambda span: span.end, default=None)

    def backward_in(spans: Mapping[tuple[ActionKind, int], Span], micro_batch: int) -> Span | None:
        return spans.get((ActionKind.BACKWARD, micro_batch)) or spans.get((ActionKind.INPUT, micro_batch))

    for micro_batch in schedule.placement.micro_batches_of(stage, process, schedule.num_micro_batches):
        forward, backward = own[ActionKind.FORWARD, micro_batch], backward_in(own, micro_batch)
        weight = own.get((ActionKind.WEIGHT, micro_batch))
        yield Held.MICRO_BATCH, forward.computes, (weight or backward or forward).end
        if before is not None:
            yield Held.INPUT, before[ActionKind.FORWARD, micro_batch].end, (backward or forward).end
        again = own.get((ActionKind.RECOMPUTE, micro_batch))
        if backward is None or again is not None:
            yield Held.FORWARD_ONLY, forward.computes, forward.end
        if backward is None:
            continue
        maker = again or forward
        yield Held.FORWARD, maker.computes, maker.end
        yield Held.GRAPH, maker.end, backward.end
        if after is not None and (source := backward_in(after, micro_batch)) is not None:
            yield Held.GRADIENT, source.end, backward.computes
        yield Held.BACKWARD, backward.computes, backward.end
        if weight is not None:
            yield Held.DEFERRED, backward.end, weight.end
            yield Held.WEIGHT, weight.computes, weight.end
        completing = weight or backward
        if completing is first_completed:
            yield Held.FIRST_BACKWARD, completing.computes, completing.end
            yield Held.WEIGHT_GRADIENTS, completing.end, math.inf


Amounts = Mapping[Held, Mapping[str, float]]
"""How much each thing that a stage holds adds to each item of a sum."""


def occupancy(
    timeline: Timeline, amounts: Mapping[int, Amounts], process: int | None = None
) -> Iterator[tuple[Seconds, dict[str, float]]]:
    """How much some stages hold over time in a worker, as steps: (from this time on, so much of each item).

    What ends makes room for what begins at the same time.

    Args:
        timeline: simulated or measured.
        amounts: of each stage that counts.
        process: the worker; None: of each stage its only one.

    Raises:
        ScheduleError: no worker is given, and a stage has several.
    """
    changes: defaultdict[Seconds, list[tuple[str, float]]] = defaultdict(list)
    for stage, of_stage in amounts.items():
        worker = timeline.schedule.placement.processes[stage] if process is None else process
        for held, start, end in holdings(timeline, stage, worker):
            if end <= start:
                continue
            for item, amount in of_stage.get(held, {}).items():
                if amount:
                    changes[start].append((item, amount))
                    changes[end].append((item, -amount))
    level: dict[str, float] = {}
    before: dict[str, float] = {}
    for time in sorted(changes):
        for item, change in changes[time]:
            level[item] = level.get(item, 0) + change
        if level != before:
            before = dict(level)
            yield time, before


def most_held(timeline: Timeline, stage: int) -> dict[Held, int]:
    """The most of each thing that a stage holds at once in any one of its workers, as a number of micro-batches."""
    most = dict.fromkeys(Held, 0)
    for process in timeline.schedule.placement.workers[stage]:
        changes: defaultdict[Held, list[tuple[Seconds, int]]] = defaultdict(list)
        for held, start, end in holdings(timeline, stage, process):
            if end > start:
                changes[held] += [(start, 1), (end, -1)]
        for held, of_held in changes.items():
            # At one time -1 comes first.
            most[held] = max(most[held], *accumulate(change for _, change in sorted(of_held)))
    return most


@lru_cache(maxsize=256)
def most_of_equal_stages(table: Schedule) -> tuple[dict[Held, int], ...]:
    """The most of each thing that each stage holds at once, if all stages are equally fast."""
    timeline = simulate(table, Costs(forward_seconds=1, backward_seconds=2, input_seconds=1, weight_seconds=1))
    return tuple(most_held(timeline, stage) for stage in range(table.num_stages))
