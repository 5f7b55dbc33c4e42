from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Schedule, build
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Held
from hf_gpipe.schedule.recompute import with_recomputations
from tests.schedule.cases import Recompute, peak, schedules, stage_order, whole

F, R, B = FORWARD, RECOMPUTE, BACKWARD


def most_live_graphs(order: list[Action], recomputed: set[int | None]) -> int:
    """Counted action by action: a forward that keeps its graph opens one, a recomputation opens one, B ends one."""
    alive: set[int | None] = set()
    most = 0
    for action in order:
        if action.kind == B or action.micro_batch not in recomputed:
            alive.add(action.micro_batch)
        most = max(most, len(alive))
        if action.kind == B:
            alive.remove(action.micro_batch)
    return most


@st.composite
def orders(draw: st.DrawFn) -> list[Action]:
    """Any order of one stage's forwards and backwards in which a backward follows its forward."""
    num_micro_batches = draw(st.integers(1, 6))
    steps = draw(st.permutations([m for m in range(num_micro_batches) for _ in range(2)]))
    seen: set[int] = set()
    order = []
    for m in steps:
        order.append(Action(B if m in seen else F, 0, m))
        seen.add(m)
    return order


@given(orders(), st.integers(1, 4))
@settings(deadline=None, max_examples=150)
def test_no_choice_recomputes_less_within_the_limit(order: list[Action], limit: int) -> None:
    result = with_recomputations(order, (limit,))
    recomputed = {action.micro_batch for action in result if action.kind == R}
    assert most_live_graphs(order, recomputed) <= limit
    everyone = {action.micro_batch for action in order}
    for fewer in combinations(everyone, len(recomputed) - 1) if recomputed else ():
        assert most_live_graphs(order, set(fewer)) > limit


@given(orders(), st.integers(0, 4) | st.none())
@settings(deadline=None, max_examples=60)
def test_a_recomputation_stands_directly_before_its_backward(order: list[Action], limit: int | None) -> None:
    result = with_recomputations(order, (limit,))
    assert [action for action in result if action.kind != R] == order
    places = [index for index, action in enumerate(result) if action.kind == R]
    assert all(result[index + 1] == Action(B, 0, result[index].micro_batch) for index in places)
    assert len(places) == (0 if limit is None else len(order) // 2 if limit == 0 else len(places))


@given(schedules())
@settings(deadline=None, max_examples=100)
def test_a_table_counts_its_graphs(case: tuple[Schedule, Recompute]) -> None:
    schedule, recompute = case
    for stage in range(schedule.num_stages):
        order = stage_order(schedule, stage)
        recomputed = {action.micro_batch for action in order if action.kind == R}
        assert schedule.num_actions(stage, RECOMPUTE) == len(recomputed)
        if not schedule.is_training:
            assert peak(schedule, stage, Held.GRAPH) == 0
            assert peak(schedule, stage, Held.MICRO_BATCH) == 1 or schedule.has_turns
            continue
        assert peak(schedule, stage, Held.GRAPH) == most_live_graphs(
            [a for a in whole(order) if a.kind != R], recomputed
        )
        in_flight = [
            sum({F: 1, B: -1, WEIGHT: -1}.get(a.kind, 0) for a in order[:end]) for end in range(1, len(order) + 1)
        ]
        assert peak(schedule, stage, Held.MICRO_BATCH) == max(in_flight)
        limit = recompute[stage] if isinstance(recompute, tuple) else None
        if limit is not None:
            assert peak(schedule, stage, Held.GRAPH) <= limit


def recomputed_at(schedule: Schedule, stage: int) -> list[int | None]:
    return [action.micro_batch for action in stage_order(schedule, stage) if action.kind == R]


def test_gpipe_fused_keeps_the_graphs_of_the_first_micro_batches() -> None:
    table = build("gpipe_fused", 3, 8, recompute=(3, 1, 1))
    # A place for the graph that is being run backwards is needed too, so that of the third goes when its turn comes.
    assert recomputed_at(table, 0) == [3, 4, 5, 6, 7]
    assert recomputed_at(table, 1) == [1, 2, 3, 4, 5, 6, 7]
    assert recomputed_at(table, 2) == []
    assert [peak(table, stage, Held.GRAPH) for stage in range(3)] == [3, 1, 1]
    assert [peak(table, stage, Held.MICRO_BATCH) for stage in range(3)] == [8, 8, 1]


def test_gpipe_keeps_the_graphs_of_the_last_micro_batches() -> None:
    table = build("gpipe", 2, 6, recompute=(1, 3))
    assert recomputed_at(table, 0) == [4, 3, 2, 1, 0]
    assert recomputed_at(table, 1) == [2, 1, 0]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_1f1b_keeps_graphs_in_rotation(num_stages: int) -> None:
    num_micro_batches = 60
    for limit in range(1, num_stages + 1):
        table = build("1f1b", num_stages, num_micro_batches, recompute=(limit,) * num_stages)
        for stage in range(num_stages):
            in_flight = num_stages - stage
            kept = num_micro_batches - table.num_actions(stage, RECOMPUTE)
            if limit >= in_flight:
                assert kept == num_micro_batches
            else:
                assert kept >= num_micro_batches * (limit - 1) / (in_flight - 1)
                assert kept <= num_micro_batches * (limit - 1) / (in_flight - 1) + in_flight


@pytest.mark.parametrize("name", ["gpipe_fused", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("num_micro_batches", [1, 4, 7])
def test_a_last_stage_whose_backward_follows_at_once_never_recomputes(name: str, num_micro_batches: int) -> None:
    for recompute in ("stage", (1, 1, 1)):
        table = build(name, 3, num_micro_batches, recompute=recompute)
        assert table.num_actions(2, RECOMPUTE) == 0
        assert peak(table, 2, Held.GRAPH) == peak(table, 2, Held.MICRO_BATCH) == 1


def test_no_limit_and_a_limit_of_all_are_no_recomputation() -> None:
    assert build("1f1b", 3, 5, recompute=(None, None, None)) is build("1f1b", 3, 5, recompute="none")
    assert build("gpipe", 3, 5, recompute=(5, 5, 5)) == build("gpipe", 3, 5, recompute="none")


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ((1, 2), "'1f1b' has 2 limits for 3 stages; give one for each"),
        ((1, 0, 1), r"'1f1b': stage 1 may keep 0 graphs alive.*at least 1, or None"),
    ],
)
def test_limits_that_cannot_be(recompute: tuple[int | None, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build("1f1b", 3, 4, recompute=recompute)
