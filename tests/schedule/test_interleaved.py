from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Costs, Placement, Schedule, build, simulate
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE, Held
from tests.schedule.cases import peak, stage_order

NAME = "interleaved_1f1b"


def table(processes: int, stages_each: int, num_micro_batches: int, recompute: str = "none") -> Schedule:
    num_stages = processes * stages_each
    return build(NAME, num_stages, num_micro_batches, Placement.interleaved(num_stages, processes), recompute)


def test_the_published_order() -> None:
    """Two processes, two stages each: process 0 runs two groups of two ahead, then one forward, one backward."""
    assert [" ".join(map(str, actions)) for actions in table(2, 2, 4).actions] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 0U 2U",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 1U 3U",
    ]


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_the_published_number_of_forwards_before_the_first_backward(
    processes: int, stages_each: int, groups: int
) -> None:
    num_micro_batches = groups * processes
    for process, actions in enumerate(table(processes, stages_each, num_micro_batches).actions):
        kinds = [action.kind for action in actions]
        published = 2 * (processes - 1 - process) + (stages_each - 1) * processes
        assert kinds.index(BACKWARD) == min(published + 1, num_micro_batches * stages_each)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.fractions(1, 4, max_denominator=4))
@settings(deadline=None, max_examples=60)
def test_the_bubble_is_a_vth_of_1f1bs(processes: int, stages_each: int, groups: int, backward: Fraction) -> None:
    num_micro_batches = groups * processes
    # The same model: a stage of 1F1B holds the layers of all stages of a process here.
    costs = Costs(Fraction(1, stages_each), backward / stages_each)
    interleaved = simulate(table(processes, stages_each, num_micro_batches), costs)
    whole = simulate(build("1f1b", processes, num_micro_batches, recompute="none"), Costs(Fraction(1), backward))
    assert interleaved.bubble == Fraction(processes - 1, stages_each * num_micro_batches + processes - 1)
    idle, whole_idle = (t.total_seconds * t.bubble for t in (interleaved, whole))
    assert idle == whole_idle / stages_each


@given(st.integers(2, 5), st.integers(2, 4), st.integers(0, 14))
@settings(deadline=None, max_examples=60)
def test_no_number_of_micro_batches_costs_much_more_than_a_multiple(
    processes: int, stages_each: int, more: int
) -> None:
    num_micro_batches = processes + more
    timeline = simulate(table(processes, stages_each, num_micro_batches), Costs(1, 2))
    fewest = 3 * (stages_each * num_micro_batches + processes - 1)
    # At most one backward of a single stage is lost, where groups of different sizes follow each other.
    assert fewest <= timeline.total_seconds <= fewest + 2


def test_twice_as_far_ahead_hides_the_transfers() -> None:
    """A message that takes half a forward stalls every pair of actions of 1F1B between two processes, here few."""
    costs, whole = (
        Costs(Fraction(1, 2), 1, transfer_seconds=Fraction(1, 4)),
        Costs(1, 2, transfer_seconds=Fraction(1, 4)),
    )
    interleaved = simulate(table(4, 2, 32), costs)
    assert interleaved.total_seconds < simulate(build("1f1b", 4, 32, recompute="none"), whole).total_seconds


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 16))
@settings(deadline=None, max_examples=60)
def test_the_last_stage_has_its_gradient_at_hand(processes: int, stages_each: int, num_micro_batches: int) -> None:
    schedule = table(processes, stages_each, num_micro_batches, "stage")
    last = schedule.num_stages - 1
    assert schedule.num_actions(last, RECOMPUTE) == 0
    assert [str(action)[len(str(last)) :] for action in stage_order(schedule, last)] == [
        f"{kind}{m}" for m in range(num_micro_batches) for kind in "FB"
    ]
    actions = [action for action in schedule.actions[-1] if action.stage == last]
    places = {action: index for index, action in enumerate(schedule.actions[-1])}
    forwards = [action for action in actions if action.kind == FORWARD]
    assert all(schedule.actions[-1][places[f] + 1].kind == BACKWARD for f in forwards)


def test_one_stage_a_process_is_1f1b_and_one_process_has_one_micro_batch_in_flight() -> None:
    assert build(NAME, 3, 5, recompute="stage").actions == build("1f1b", 3, 5, recompute="stage").actions
    alone = table(1, 3, 4)
    assert [peak(alone, stage, Held.MICRO_BATCH) for stage in range(3)] == [1, 1, 1]


def test_stages_that_are_not_dealt_out_in_turn() -> None:
    with pytest.raises(ScheduleError, match=r"in turn.* is 0 0 1 1. Use Placement.interleaved"):
        build(NAME, 4, 4, Placement.spread(4, 2))
    with pytest.raises(ScheduleError, match="the placement is 0 0 0 1 1"):
        build(NAME, 5, 4, Placement.spread(5, 2))
