"""Tables under a limit of memory: the best of named schedules, that of list scheduling, and the optimum.

A stage's graph of a micro-batch takes 16 units of memory, of which 1 is its received input, and what W needs takes 10.
A process may hold so many units as 1.5, 2 or 3 graphs. What it holds counts from the start of F, or R, to the ends of I
and W. The optima are those of integer programming over F, R, I and W (CP-SAT of OR-tools), all proved but for the four
equal stages with room for 3 graphs, whose bound is 270.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from bench.emulation import Emulated
from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Costs, Placement, Schedule, Timeline, build, check_table, placement_for, simulate
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.updates import with_updates

GRAPH, RECEIVED, DEFERRED = 16, 1, 10
#: By head, K and graphs, the seconds of the shortest table of M = 2 K micro-batches.
OPTIMA = {
    **{("equal", 3, 1.5): 243, ("equal", 3, 2): 225, ("equal", 3, 3): 204},
    **{("equal", 4, 1.5): 342, ("equal", 4, 2): 314, ("equal", 4, 3): 293},
    **{("big head", 3, 1.5): 272, ("big head", 3, 2): 265, ("big head", 3, 3): 251},
    **{("big head", 4, 1.5): 369, ("big head", 4, 2): 362, ("big head", 4, 3): 348},
}
#: Of an emulated stage: the seconds of a unit of time, and what crosses a boundary.
UNIT, BOUNDARY_BYTES = 0.002, 1 << 16
#: As much as the planner spends on so many stages and micro-batches, and at most.
_EFFORT_OF_ACTION, _MOST_EFFORT = 1_500, 1_000_000


@dataclass(frozen=True)
class Case:
    """A pipeline under a limit.

    Attributes:
        head: "equal": all processes have the same work; "big head": the last has a head besides.
        processes: K.
        micro_batches: M.
        graphs: that a process has room for.
    """

    head: str
    processes: int
    micro_batches: int
    graphs: float

    @property
    def limit(self) -> float:
        return int(GRAPH * self.graphs)

    def seconds(self, stages_each: int = 1) -> tuple[list[float], list[float], list[float]]:
        """F, I and W of each stage, where a process's blocks are cut into so many; a head stays whole."""
        count = self.processes * stages_each
        is_big = self.head == "big head"
        if stages_each == 1 and is_big:
            others = count - 1
            return [10.0] * others + [8.0], [11.0] * others + [23.0], [9.0] * others + [7.0]
        each = (10.0 * (self.processes - 1) + 8.0 if is_big else 10.0 * self.processes) / count
        inputs = [1.1 * each] * count
        inputs[-1] += 14.0 * is_big
        return [each] * count, inputs, [0.9 * each] * count

    def costs(self, table: Schedule, unit: float = 1.0) -> Costs:
        """Of the stages of a table, for so many seconds a unit of time."""
        forward, inputs, weights = (
            [unit * seconds for seconds in every] for every in self.seconds(table.num_stages // self.processes)
        )
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
        return Costs(forward, backward, input_seconds=inputs, weight_seconds=weights)

    def emulated(self, name: str, table: Schedule) -> Emulated:
        """The same with a table, in processes that wait."""
        return Emulated(table, self.costs(table, UNIT), BOUNDARY_BYTES, name)

    def timeline(self, table: Schedule) -> Timeline:
        return simulate(table, self.costs(table))

    def fits(self, timeline: Timeline) -> bool:
        """Whether every process stays within the limit."""
        return max(_most_held(timeline, *_units(timeline.schedule.num_stages // self.processes))) <= self.limit


def _units(stages_each: int) -> tuple[float, float, float]:
    """Of a stage: what a graph takes, its received input, and what W needs."""
    return GRAPH / stages_each, RECEIVED, DEFERRED / stages_each


def _most_held(timeline: Timeline, graph: float, received: float, deferred: float) -> list[float]:
    """The units that each process holds at most."""
    again = {(s.action.stage, s.action.micro_batch) for s in timeline.spans if s.action.kind == RECOMPUTE}
    at_start = {RECOMPUTE: graph - received}
    at_end = {INPUT: deferred - graph, WEIGHT: -deferred, BACKWARD: -graph}
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.schedule.placement.num_processes)]
    for process, action, start, end, *_ in timeline.spans:
        of_forward = received if (action.stage, action.micro_batch) in again else graph
        changes[process].append((float(start), of_forward if action.kind == FORWARD else at_start.get(action.kind, 0)))
        changes[process].append((float(end), at_end.get(action.kind, 0)))
    return [max(accumulate(change for _, change in sorted(of_process))) for of_process in changes]


def best_named(case: Case) -> tuple[float, str, Schedule]:
    """The shortest table of a named schedule that fits: its seconds, its name, and the table. Raises ValueError."""
    candidates = []
    for name, stages_each, recompute in _ways(case):
        count = case.processes * stages_each
        try:
            table = build(name, count, case.micro_batches, placement_for(name, count, case.processes), recompute)
        except ScheduleError:
            continue
        timeline = case.timeline(table)
        if case.fits(timeline):
            candidates.append((float(timeline.total_seconds), f"{name}, {_words(recompute)}", table))
    return min(candidates, key=lambda candidate: candidate[0])


def _words(recompute: str | tuple[int | None, ...]) -> str:
    if isinstance(recompute, str):
        return f"R {recompute}"
    every = ["all" if limit is None else str(limit) for limit in recompute]
    return f"graphs {every[0] if len(set(every)) == 1 else '-'.join(every)}"


def _ways(case: Case) -> Iterator[tuple[str, int, str | tuple[int | None, ...]]]:
    """Names, stages a process, and what is recomputed: every limit of graphs for each of up to four stages."""
    most, processes = int(case.graphs), case.processes
    of_stages = [*range(1, most + 1), None]
    limits: Sequence[tuple[int | None, ...]] = [(limit,) * processes for limit in of_stages]
    if processes <= 4:
        limits = list(product(of_stages, repeat=processes))
    for name in ("1f1b", "zb_h1", "zb_h2", "gpipe", "gpipe_fused"):
        for recompute in ("stage", *limits):
            yield name, 1, recompute
    for name in ("zb_v", "v_half", "interleaved_1f1b"):
        for recompute in ("none", "stage", *((n,) * (2 * processes) for n in range(1, 2 * most + 1))):
            yield name, 2, recompute


def listed(case: Case, stages_each: int = 1) -> tuple[float, Schedule, float]:
    """The seconds of the table that list scheduling finds, the table, and the seconds of CPU that this took.

    With two stages a process they are placed in the shape of a V.
    """
    count = case.processes * stages_each
    placement = Placement.one_stage_each(count) if stages_each == 1 else Placement.v_shaped(count, case.processes)
    forward, inputs, weights = case.seconds(stages_each)
    held, received, deferred = ([size] * count for size in _units(stages_each))
    work = Work(forward, inputs, weights, held, deferred, [0.0] * (count - 1), forward, received)
    effort = min(_MOST_EFFORT, _EFFORT_OF_ACTION * 3 * count * min(case.micro_batches, 2 * case.processes))
    start = time.process_time()
    best = best_listed(placement, case.micro_batches, work, [case.limit] * case.processes, effort=effort)
    took = time.process_time() - start
    rows = with_updates(best.orders, placement)
    table = Schedule("listed", count, case.micro_batches, placement, tuple(map(tuple, rows)))
    check_table(table)
    timeline = case.timeline(table)
    assert case.fits(timeline)
    return float(timeline.total_seconds), table, took
