"""Hypothesis strategies: tables of every schedule, wherever the schedule can be placed and however it recomputes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD
from hf_gpipe.schedule import SCHEDULES, V_SHAPED, Action, Placement, Schedule, Timeline, build
from hf_gpipe.schedule.kinds import BACKWARD, INPUT, UPDATE, WEIGHT, Held, Resource
from hf_gpipe.schedule.occupancy import most_of_equal_stages
from hf_gpipe.schedule.simulate import Seconds

#: They have no order for chunks.
VOCABULARY = (*DIVIDED_HEAD, "vocab_forward_only")
#: Those of one step whose stages have workers of their own.
OWN = tuple(name for name, named in SCHEDULES.items() if named.orders is not None and not named.is_shared)
Recompute = str | tuple[int | None, ...]


@st.composite
def placements(draw: st.DrawFn, name: str = "gpipe") -> Placement:
    """Any stages in any processes, contiguous, looped or scattered; in turn or in a V where the schedule wants it."""
    if name == "interleaved_1f1b":
        num_processes = draw(st.integers(1, 4))
        return Placement.interleaved(num_processes * draw(st.integers(1, 4)), num_processes)
    if name in V_SHAPED:
        num_processes = draw(st.integers(1, 4))
        return Placement.v_shaped(2 * num_processes, num_processes)
    num_stages = draw(st.integers(1, 6))
    drawn = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    numbers = {process: number for number, process in enumerate(sorted(set(drawn)))}
    return Placement(tuple(numbers[process] for process in drawn))


@st.composite
def recomputes(draw: st.DrawFn, num_stages: int) -> Recompute:
    """Either mode, or a limit for each stage."""
    limit = st.none() | st.integers(1, 7)
    return draw(st.sampled_from(["stage", "none"]) | st.tuples(*[limit] * num_stages))


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = OWN) -> tuple[Schedule, Recompute]:
    """A table, of whole rows or of rows cut into chunks, and how it was asked to recompute."""
    name = draw(st.sampled_from(names))
    placement = draw(placements(name))
    recompute = draw(recomputes(placement.num_stages))
    chunks = 1 if name in VOCABULARY else draw(st.sampled_from([1, 1, 2, 3, 5]))
    count = chunks * draw(st.integers(1, max(1, 7 // chunks)))
    return build(name, placement.num_stages, count, placement, recompute, group_size=chunks), recompute


def stage_order(schedule: Schedule, stage: int) -> list[Action]:
    """A stage's actions in the order in which its process runs them, the update left out."""
    actions = schedule.actions[schedule.placement.workers[stage][0]]
    return [action for action in actions if action.stage == stage and action.kind != UPDATE]


def peak(schedule: Schedule, stage: int, held: Held) -> int:
    """The most that a stage of a table holds at once, a backward taking twice as long as a forward."""
    return most_of_equal_stages(schedule)[stage][held]


def whole(order: list[Action]) -> list[Action]:
    """An order with B for I, and without W."""
    kept = [action for action in order if action.kind != WEIGHT]
    return [replace(action, kind=BACKWARD) if action.kind == INPUT else action for action in kept]


def idle_seconds(timeline: Timeline, process: int) -> Seconds:
    """How long the device of a process runs no action."""
    own = [span for span in timeline.spans if span.process == process]
    return timeline.total_seconds - sum(span.busy for span in own if span.action.kind.resource is Resource.COMPUTE)
