"""A bound on what a stage needs under a table, quick enough to ask for every stage that a split could have.

It takes the most graphs, boundaries and waiting gradients that the table ever has alive, were all stages equally fast.
What a chosen plan really needs is then counted action by action (memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hf_gpipe.planner.memory import StageLayers
from hf_gpipe.planner.plan import Planner
from hf_gpipe.recipe import DecidedConfig as Settings
from hf_gpipe.recipe import RecomputeChoice
from hf_gpipe.schedule import Action, ActionKind, Costs, Schedule, simulate


@dataclass(frozen=True)
class Alive:
    """The most that a stage has alive at once of each kind, as numbers of micro-batches."""

    boundaries: int
    graphs: int
    gradients: int
    """That wait for their backward."""


def alive(planner: Planner, settings: Settings, recompute: RecomputeChoice) -> tuple[Alive, ...]:
    """What each stage has alive under this recomputation, were all stages equally fast."""
    return _alive(
        planner.table(
            settings.schedule, settings.num_stages, settings.num_micro_batches, recompute, settings.num_processes
        )
    )


@lru_cache(maxsize=256)
def _alive(table: Schedule) -> tuple[Alive, ...]:
    timeline = simulate(table, Costs(forward_seconds=1, backward_seconds=2))
    counts = []
    end = {span.action: float(span.end) for span in timeline.spans}
    start = {span.action: float(span.start) for span in timeline.spans}
    for stage in range(table.num_stages):
        boundaries, gradients = [], []
        for micro_batch in range(table.num_micro_batches):
            forward = Action(ActionKind.FORWARD, stage, micro_batch)
            backward = Action(ActionKind.BACKWARD, stage, micro_batch)
            if source := forward.source(table.num_stages):
                boundaries.append((end[source], end[backward]))
            if source := backward.source(table.num_stages):
                gradients.append((end[source], start[backward]))
        counts.append(Alive(_most(boundaries), table.peak_live_graphs(stage), _most(gradients)))
    return tuple(counts)


def stage_bytes(planner: Planner, settings: Settings, counts: Alive, stage: StageLayers) -> float:
    """What a stage needs at most, as its process's only one."""
    return sum(stage_parts(planner, settings, counts, stage))


def stage_parts(planner: Planner, settings: Settings, counts: Alive, stage: StageLayers) -> tuple[float, float]:
    """What a stage keeps at most, and what it works with beside that.

    It is a bound: the moments at which graphs, boundaries and gradients are the most need not be the same one.
    """
    costs = planner.costs(settings.num_micro_batches)
    memory = planner.memory_sums(settings)
    num_micro_batches = planner.micro_batches_of_step(settings.num_micro_batches)
    start, stop = stage.start, stage.stop
    received = costs.layers[start].input_bytes if start else 0
    waiting = costs.layers[stop].gradient_input_bytes if stop < len(costs.layers) else 0
    coming = counts.graphs * memory.graph_bytes(start, stop, stage.inner)
    coming += counts.boundaries * received + counts.gradients * waiting
    always = memory.static_bytes(start, stop) + num_micro_batches * costs.micro_batch_bytes
    working = memory.working_bytes(start, stop, stage.inner)
    reserved = planner.device.reserved_share
    always += reserved * costs.held(start, stop).trainable_bytes
    return always + (1 + reserved) * coming, (1 + reserved) * working


def _most(intervals: Sequence[tuple[float, float]]) -> int:
    """How many intervals overlap at most; an end makes room for a start."""
    lasting = [(start, end) for start, end in intervals if end > start]
    changes = sorted([(start, 1) for start, _ in lasting] + [(end, -1) for _, end in lasting])
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most
