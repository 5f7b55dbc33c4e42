from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD, LOGITS, LOGITS_GRADIENT
from hf_gpipe.schedule import (
    IN_TURN,
    SCHEDULES,
    SPLIT_SCHEDULES,
    V_SHAPED,
    Action,
    ActionKind,
    Costs,
    NamedSchedule,
    Placement,
    Schedule,
    build,
    builders,
    check_table,
    draw_text,
    placement_for,
    simulate,
)
from hf_gpipe.schedule.clock import merge
from hf_gpipe.schedule.kinds import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    UPDATE,
    WEIGHT,
    Held,
)
from hf_gpipe.schedule.recompute import Limits
from tests.schedule.cases import OWN, VOCABULARY, Recompute, peak, placements, recomputes, schedules, stage_order, whole

PLACED = (*V_SHAPED, "interleaved_1f1b")
F, R, B, U = FORWARD, RECOMPUTE, BACKWARD, UPDATE


@given(schedules())
@settings(deadline=None, max_examples=100)
def test_every_table_is_valid_and_survives_its_text(case: tuple[Schedule, Recompute]) -> None:
    schedule, _ = case
    check_table(schedule)
    again = Schedule.from_text(schedule.text())
    assert again == schedule
    check_table(again)


@given(st.sampled_from(sorted(OWN)), st.integers(1, 7), st.data())
@settings(deadline=None, max_examples=100)
def test_every_action_exactly_once(name: str, num_micro_batches: int, data: st.DataObject) -> None:
    placement = data.draw(placements(name))
    num_stages = placement.num_stages
    recompute = data.draw(recomputes(num_stages))
    schedule = build(name, num_stages, num_micro_batches, placement, recompute)
    every = [(s, m) for s in range(num_stages) for m in range(num_micro_batches)]
    expected = [Action(F, s, m) for s, m in every]
    if name in VOCABULARY:
        expected += [Action(LOGITS, s, m) for s, m in every]
        expected += [Action(LOGITS_GRADIENT, s, m) for s, m in every if name in DIVIDED_HEAD]
    if not name.endswith("forward_only"):
        for s, m in every:
            split = [Action(INPUT, s, m), Action(WEIGHT, s, m)]
            expected += split if (s, m) in schedule.split else [Action(B, s, m)]
        assert (name in SPLIT_SCHEDULES) or not schedule.split
        expected += [Action(U, s) for s in range(num_stages)]
    recomputed = [action for actions in schedule.actions for action in actions if action.kind == R]
    if name.endswith("forward_only") or recompute == "none":
        assert recomputed == []
    elif recompute == "stage":
        fused = name not in ("gpipe", "naive", *DIVIDED_HEAD)
        if name in ("zb_v", "v_half"):  # The last stage keeps one graph, which is not always that of the next I.
            recomputed = [action for action in recomputed if action.stage < num_stages - 1]
        assert sorted(recomputed) == [Action(R, s, m) for s, m in every if not (fused and s == num_stages - 1)]
    assert len(set(recomputed)) == len(recomputed)
    done = [action for actions in schedule.actions for action in actions]
    assert sorted(action for action in done if action.kind != R) == sorted(expected)
    for process, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(placement.stages_of(process))


@given(schedules(names=tuple(name for name in OWN if name not in (*PLACED, *VOCABULARY))))
@settings(deadline=None, max_examples=100)
def test_a_stage_works_in_the_same_order_wherever_it_is(case: tuple[Schedule, Recompute]) -> None:
    """Apart from W, which is a part of B where no other process waits for the I before it."""
    schedule, recompute = case
    count, chunks = schedule.num_micro_batches, schedule.group_size
    alone = build(schedule.name, schedule.num_stages, count, None, recompute, group_size=chunks)
    for stage in range(schedule.num_stages):
        assert whole(stage_order(schedule, stage)) == whole(stage_order(alone, stage))


@given(schedules())
@settings(deadline=None, max_examples=100)
def test_messages_are_received_in_the_order_in_which_they_are_sent(case: tuple[Schedule, Recompute]) -> None:
    schedule, _ = case

    def order(stage: int, *kinds: ActionKind) -> list[int | None]:
        return [action.micro_batch for action in stage_order(schedule, stage) if action.kind in kinds]

    for stage in range(schedule.num_stages - 1):
        assert order(stage, F) == order(stage + 1, F)
        assert order(stage, B, INPUT) == order(stage + 1, B, INPUT)


@pytest.mark.parametrize("name", ["naive", "gpipe", "gpipe_fused"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_one_process_keeps_one_recomputed_graph_at_a_time(name: str, num_micro_batches: int, num_stages: int) -> None:
    (actions,) = build(name, num_stages, num_micro_batches, Placement.spread(num_stages, 1)).actions
    for action, following in pairwise(actions):
        if action.kind == R:
            assert following == Action(B, action.stage, action.micro_batch)


@given(st.integers(1, 8), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_1f1b_holds_few_micro_batches_and_has_the_bubble_of_gpipe(num_stages: int, num_micro_batches: int) -> None:
    schedule = build("1f1b", num_stages, num_micro_batches, recompute="none")
    timeline = simulate(schedule, Costs(Fraction(1), Fraction(2)))
    assert timeline.bubble == Fraction(num_stages - 1, num_micro_batches + num_stages - 1)
    for stage in range(num_stages):
        assert peak(schedule, stage, Held.MICRO_BATCH) == min(num_stages - stage, num_micro_batches)


def on_devices(num_stages: int) -> Placement:
    """One process, each stage on a device of its own."""
    return Placement((0,) * num_stages, tuple(f"cuda:{stage}" for stage in range(num_stages)))


@given(st.sampled_from(sorted(set(OWN) - {*V_SHAPED, *VOCABULARY})), st.integers(1, 6), st.integers(1, 9), st.data())
@settings(deadline=None, max_examples=60)
def test_one_process_keeps_several_devices_as_busy_as_several_processes(
    name: str, num_stages: int, num_micro_batches: int, data: st.DataObject
) -> None:
    recompute = data.draw(recomputes(num_stages))
    several = build(name, num_stages, num_micro_batches, on_devices(num_stages), recompute)
    alone = build(name, num_stages, num_micro_batches, Placement.interleaved(num_stages, num_stages), recompute)
    check_table(several)
    costs = Costs(1, 2)
    assert simulate(several, costs).total_seconds == simulate(alone, costs).total_seconds
    assert simulate(several, costs).bubble == simulate(alone, costs).bubble
    for stage in range(num_stages):
        assert whole(stage_order(several, stage)) == whole(stage_order(alone, stage))


def test_the_order_for_one_device_would_keep_several_waiting() -> None:
    """K = 4, M = 16: a host that starts actions in that order, each when it can run, takes more than twice as long."""
    for_one = build("gpipe", 4, 16, Placement.spread(4, 1))
    before = replace(for_one, placement=on_devices(4))
    after = build("gpipe", 4, 16, on_devices(4))
    assert simulate(before, Costs(1, 2)).total_seconds == 163
    assert simulate(after, Costs(1, 2)).total_seconds == 73


def test_interleaved_stages_on_several_devices_per_process() -> None:
    devices = ("cuda:0", "cuda:2", "cuda:0", "cuda:2", "cuda:1", "cuda:3", "cuda:1", "cuda:3")
    placement = Placement.interleaved(8, 2)
    one_each = build("interleaved_1f1b", 8, 8, placement, "none")
    two_each = build("interleaved_1f1b", 8, 8, replace(placement, devices=devices), "none")
    for stage in range(8):
        assert stage_order(two_each, stage) == stage_order(one_each, stage)
    assert simulate(two_each, Costs(1, 2)).total_seconds < simulate(one_each, Costs(1, 2)).total_seconds


@given(placements(), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_a_stage_keeps_one_recomputed_graph_at_a_time(placement: Placement, num_micro_batches: int) -> None:
    schedule = build("gpipe", placement.num_stages, num_micro_batches, placement, "stage")
    assert all(peak(schedule, stage, Held.GRAPH) == 1 for stage in range(placement.num_stages))


def test_several_stages_in_a_process() -> None:
    one = build("gpipe", 2, 2, Placement.spread(2, 1), "none")
    assert " ".join(map(str, one.actions[0])) == "0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0 0U 1U"
    # Process 0 recomputes both of its stages while the first gradient is on its way, the deeper stage first.
    two = build("gpipe", 4, 2, Placement.spread(4, 2), "stage")
    assert " ".join(map(str, two.actions[0])) == "0F0 1F0 0F1 1F1 1R1 0R1 1B1 0B1 1R0 0R0 1B0 0B0 0U 1U"
    assert " ".join(map(str, two.actions[1])) == "2F0 3F0 2F1 3F1 3R1 3B1 2R1 2B1 3R0 3B0 2R0 2B0 2U 3U"


def test_naive_has_one_micro_batch_in_the_pipeline() -> None:
    (actions,) = build("naive", 3, 2, Placement.spread(3, 1), "none").actions
    assert " ".join(map(str, actions)) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1 0U 1U 2U"


def drawings(name: str) -> str:
    """The drawings in a builder's docstring."""
    doc = SCHEDULES[name].orders.__doc__ or ""
    return "\n".join(line.strip() for line in doc.splitlines() if line.strip().startswith("stage "))


@pytest.mark.parametrize(
    ("name", "placement", "num_micro_batches", "recomputes"),
    [
        ("naive", Placement.one_stage_each(3), 2, ["none"]),
        ("gpipe", Placement.one_stage_each(3), 3, ["none", "stage"]),
        ("gpipe_fused", Placement.one_stage_each(3), 3, ["stage"]),
        ("1f1b", Placement.one_stage_each(3), 4, ["none", "stage"]),
        ("interleaved_1f1b", Placement.interleaved(4, 2), 4, ["none"]),
        ("zb_h1", Placement.one_stage_each(3), 4, ["none"]),
        ("zb_h2", Placement.one_stage_each(3), 5, ["none"]),
        ("zb_v", Placement.v_shaped(4, 2), 4, ["none"]),
        ("v_half", Placement.v_shaped(4, 2), 4, ["none"]),
        ("forward_only", Placement.one_stage_each(3), 3, ["stage"]),
        ("vocab_gpipe", Placement.one_stage_each(3), 3, ["none"]),
        ("vocab_1f1b", Placement.one_stage_each(3), 4, ["none"]),
        ("vocab_forward_only", Placement.one_stage_each(3), 3, ["stage"]),
    ],
)
def test_the_docstrings_draw_the_real_tables(
    name: str, placement: Placement, num_micro_batches: int, recomputes: list[str]
) -> None:
    others = {LOGITS: 1, LOGITS_GRADIENT: 2}
    costs = Costs(forward_seconds=1, backward_seconds=2, recompute_seconds=1, others=others)
    tables = [build(name, placement.num_stages, num_micro_batches, placement, mode) for mode in recomputes]
    drawn = [draw_text(simulate(table, costs)) for table in tables]
    assert drawings(name) == "\n".join("\n".join(text.splitlines()[:-1]) for text in drawn)


def test_where_a_schedule_wants_its_stages() -> None:
    assert {str(placement_for(name, 6, 2)) for name in IN_TURN} == {"0 1 0 1 0 1"}
    assert str(placement_for("zb_v", 6, 3)) == "0 1 2 2 1 0"
    for name in set(OWN) - set(V_SHAPED):
        assert placement_for(name, 5, 1) == Placement.spread(5, 1)
        assert placement_for(name, 3, 3) == Placement.one_stage_each(3)
        if name not in IN_TURN:
            assert str(placement_for(name, 5, 2)) == "0 0 0 1 1"
    with pytest.raises(ScheduleError, match=r"5 stages cannot be interleaved over 2 processes.*multiple"):
        placement_for("interleaved_1f1b", 5, 2)
    with pytest.raises(ScheduleError, match=r"5 stages cannot be placed in a V on 2 processes.*twice"):
        placement_for("v_half", 5, 2)
    with pytest.raises(ScheduleError, match=r"'zb_v' has two stages on each process.*placement is 0 0 1 1"):
        build("zb_v", 4, 4, Placement.spread(4, 2))
    with pytest.raises(ScheduleError, match=r"'1f1' is unknown.*did you mean '1f1b'"):
        placement_for("1f1", 4, 2)


def test_equal_arguments_give_the_same_table() -> None:
    assert build("gpipe", 3, 4) is build("gpipe", 3, 4, Placement.one_stage_each(3), recompute="stage")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gipe", 2, 2), "'gipe' is unknown; use one of naive, gpipe, .*did you mean 'gpipe'"),
        (("gpipe", 0, 4), "num_stages is 0 and num_micro_batches is 4"),
        (("gpipe", 4, 0), "num_stages is 4 and num_micro_batches is 0"),
        (("gpipe", 2, 2, Placement.one_stage_each(3)), "num_stages is 2, but the placement is of 3 stages"),
        (("gpipe", 2, 2, None, "stages"), "recompute 'stages' is unknown.*did you mean 'stage'"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(*arguments)  # type: ignore[arg-type]


def test_a_builder_of_another_schedule_fits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward, one backward: a stage's order is all that a new schedule has to write."""

    def one_forward_one_backward(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
        orders = []
        for stage in range(placement.num_stages):
            ahead = min(placement.num_stages - 1 - stage, num_micro_batches)
            order = [Action(F, stage, m) for m in range(ahead)]
            for m in range(num_micro_batches):
                order += [Action(F, stage, m + ahead)] if m + ahead < num_micro_batches else []
                order += [Action(B, stage, m)]
            orders.append(order)
        return merge(orders, placement)

    monkeypatch.setitem(builders.SCHEDULES, "another", NamedSchedule(one_forward_one_backward))
    for placement in (Placement.spread(4, 1), Placement.spread(4, 2), Placement((0, 1, 0, 1))):
        build("another", 4, 6, placement, "none")
    table = build("another", 4, 6, None, "none")
    assert [peak(table, stage, Held.MICRO_BATCH) for stage in range(4)] == [4, 3, 2, 1]
    assert simulate(table, Costs(1, 2)).total_seconds == 27


def test_stage_orders_that_wait_for_each_other_cannot_be_merged() -> None:
    orders = [[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]]
    with pytest.raises(ScheduleError, match="deadlock: 0B0 waits for 1B0"):
        merge(orders, Placement.spread(2, 1))
