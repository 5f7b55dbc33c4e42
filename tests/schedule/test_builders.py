from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Costs,
    Placement,
    Schedule,
    build,
    builders,
    draw_text,
    simulate,
)
from hf_gpipe.schedule.clock import merge

F, R, B, U = ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.UPDATE


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any stages in any processes: contiguous, looped or scattered."""
    num_stages = draw(st.integers(1, 6))
    drawn = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    numbers = {process: number for number, process in enumerate(sorted(set(drawn)))}
    return Placement(tuple(numbers[process] for process in drawn))


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> Schedule:
    placement = draw(placements())
    name, recompute = draw(st.sampled_from(names)), draw(st.sampled_from(["stage", "none"]))
    return build(name, placement.num_stages, draw(st.integers(1, 6)), placement, recompute)


def stage_order(schedule: Schedule, stage: int) -> list[Action]:
    process = schedule.placement.processes[stage]
    return [action for action in schedule.actions[process] if action.stage == stage]


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_every_table_is_valid_and_survives_its_text(schedule: Schedule) -> None:
    schedule.validate()
    again = Schedule.from_text(schedule.text())
    assert again == schedule
    again.validate()


@given(placements(), st.integers(1, 6), st.sampled_from(sorted(SCHEDULES)), st.sampled_from(["stage", "none"]))
@settings(deadline=None, max_examples=200)
def test_every_action_exactly_once(placement: Placement, num_micro_batches: int, name: str, recompute: str) -> None:
    num_stages = placement.num_stages
    schedule = build(name, num_stages, num_micro_batches, placement, recompute)
    expected = [Action(F, s, m) for s in range(num_stages) for m in range(num_micro_batches)]
    if name != "forward_only":
        expected += [Action(B, s, m) for s in range(num_stages) for m in range(num_micro_batches)]
        expected += [Action(U, s) for s in range(num_stages)]
        if recompute == "stage":
            recomputing = num_stages - 1 if name in ("gpipe_fused", "1f1b") else num_stages
            expected += [Action(R, s, m) for s in range(recomputing) for m in range(num_micro_batches)]
    assert sorted(action for actions in schedule.actions for action in actions) == sorted(expected)
    for process, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(placement.stages_of(process))


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_a_stage_works_in_the_same_order_wherever_it_is(schedule: Schedule) -> None:
    recompute = "stage" if any(action.kind == R for actions in schedule.actions for action in actions) else "none"
    alone = build(schedule.name, schedule.num_stages, schedule.num_micro_batches, None, recompute)
    for stage in range(schedule.num_stages):
        assert stage_order(schedule, stage) == list(alone.actions[stage])


@given(schedules())
@settings(deadline=None, max_examples=200)
def test_messages_are_received_in_the_order_in_which_they_are_sent(schedule: Schedule) -> None:
    def order(kind: ActionKind, stage: int) -> list[int | None]:
        return [action.micro_batch for action in stage_order(schedule, stage) if action.kind == kind]

    for stage in range(schedule.num_stages - 1):
        assert order(F, stage) == order(F, stage + 1)
        assert order(B, stage) == order(B, stage + 1)


@given(schedules(names=("naive", "gpipe", "forward_only")))
@settings(deadline=None, max_examples=200)
def test_tables_that_run_with_blocking_sends(schedule: Schedule) -> None:
    places = list(schedule.placement.processes)
    if places == sorted(places) or schedule.name == "naive":
        schedule.validate(rendezvous=True)


@given(st.integers(2, 6), st.integers(1, 6), st.data())
@settings(deadline=None, max_examples=60)
def test_gpipe_fused_with_blocking_sends(num_stages: int, num_micro_batches: int, data: st.DataObject) -> None:
    placement = Placement.spread(num_stages, data.draw(st.integers(2, num_stages)))
    schedule = build("gpipe_fused", num_stages, num_micro_batches, placement)
    last_is_alone = len(placement.stages_of(placement.num_processes - 1)) == 1
    if last_is_alone and num_micro_batches > 1:
        with pytest.raises(ScheduleError, match="deadlock with blocking sends"):
            schedule.validate(rendezvous=True)
    else:
        schedule.validate(rendezvous=True)


@pytest.mark.parametrize("name", ["naive", "gpipe", "gpipe_fused"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 5])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_one_process_keeps_one_recomputed_graph_at_a_time(name: str, num_micro_batches: int, num_stages: int) -> None:
    (actions,) = build(name, num_stages, num_micro_batches, Placement.one_process(num_stages)).actions
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
        assert timeline.peak_live_micro_batches(stage) == min(num_stages - stage, num_micro_batches)


@given(st.integers(2, 6), st.integers(2, 6))
@settings(deadline=None, max_examples=30)
def test_1f1b_deadlocks_with_blocking_sends(num_stages: int, num_micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="deadlock with blocking sends"):
        build("1f1b", num_stages, num_micro_batches).validate(rendezvous=True)


@given(placements(), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_a_stage_keeps_one_recomputed_graph_at_a_time(placement: Placement, num_micro_batches: int) -> None:
    schedule = build("gpipe", placement.num_stages, num_micro_batches, placement, "stage")
    timeline = simulate(schedule, Costs(1, 2, activation_bytes=1))
    assert all(timeline.peak_bytes(stage) == 1 for stage in range(placement.num_stages))


def test_several_stages_in_a_process() -> None:
    one = build("gpipe", 2, 2, Placement.one_process(2), "none")
    assert " ".join(map(str, one.actions[0])) == "0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0 0U 1U"
    # Process 0 recomputes both of its stages while the first gradient is on its way, the deeper stage first.
    two = build("gpipe", 4, 2, Placement.spread(4, 2), "stage")
    assert " ".join(map(str, two.actions[0])) == "0F0 1F0 0F1 1F1 1R1 0R1 1B1 0B1 1R0 0R0 1B0 0B0 0U 1U"
    assert " ".join(map(str, two.actions[1])) == "2F0 3F0 2F1 3F1 3R1 3B1 2R1 2B1 3R0 3B0 2R0 2B0 2U 3U"


def test_naive_has_one_micro_batch_in_the_pipeline() -> None:
    (actions,) = build("naive", 3, 2, Placement.one_process(3), "none").actions
    assert " ".join(map(str, actions)) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1 0U 1U 2U"


def drawings(name: str) -> str:
    """The drawings in a builder's docstring."""
    doc = SCHEDULES[name].__doc__ or ""
    return "\n".join(line.strip() for line in doc.splitlines() if line.strip().startswith("stage "))


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "recomputes"),
    [
        ("naive", 2, ["none"]),
        ("gpipe", 3, ["none", "stage"]),
        ("gpipe_fused", 3, ["stage"]),
        ("1f1b", 4, ["none", "stage"]),
        ("forward_only", 3, ["stage"]),
    ],
)
def test_the_docstrings_draw_the_real_tables(name: str, num_micro_batches: int, recomputes: list[str]) -> None:
    costs = Costs(forward_seconds=1, backward_seconds=2, recompute_seconds=1)
    drawn = [draw_text(simulate(build(name, 3, num_micro_batches, recompute=mode), costs)) for mode in recomputes]
    assert drawings(name) == "\n".join("\n".join(text.splitlines()[:-1]) for text in drawn)


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

    def one_forward_one_backward(
        num_stages: int, num_micro_batches: int, placement: Placement, recompute: bool
    ) -> list[list[Action]]:
        orders = []
        for stage in range(num_stages):
            ahead = min(num_stages - 1 - stage, num_micro_batches)
            order = [Action(F, stage, m) for m in range(ahead)]
            for m in range(num_micro_batches):
                order += [Action(F, stage, m + ahead)] if m + ahead < num_micro_batches else []
                order += [Action(B, stage, m)]
            orders.append(order)
        return merge(orders, placement)

    monkeypatch.setitem(builders.SCHEDULES, "another", one_forward_one_backward)
    for placement in (Placement.one_process(4), Placement.spread(4, 2), Placement((0, 1, 0, 1))):
        build("another", 4, 6, placement, "none")
    timeline = simulate(build("another", 4, 6, None, "none"), Costs(1, 2))
    assert [timeline.peak_live_micro_batches(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert timeline.total_seconds == 27


def test_stage_orders_that_wait_for_each_other_cannot_be_merged() -> None:
    orders = [[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]]
    with pytest.raises(ScheduleError, match="deadlock: 0B0 waits for 1B0"):
        merge(orders, Placement.one_process(2))
