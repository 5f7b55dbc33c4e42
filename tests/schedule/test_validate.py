"""Tables that are broken in one place: the error names the place."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Schedule, check_table
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE
from tests.schedule.cases import schedules


def table(*processes: str, num_stages: int = 2, num_micro_batches: int = 1, placement: str | None = None) -> Schedule:
    places = placement or " ".join(map(str, range(len(processes))))
    lines = [
        "table: 10",
        "schedule: by hand",
        f"num_stages: {num_stages}",
        f"num_micro_batches: {num_micro_batches}",
        f"placement: {places}",
        *(f"process {number}: {actions}" for number, actions in enumerate(processes)),
    ]
    return Schedule.from_text("\n".join(lines))


def test_small_tables_by_hand_are_valid() -> None:
    check_table(table("0F0", "1F0"))
    check_table(table("0F0 0B0 0U", "1F0 1B0 1U"))
    check_table(table("0F0 0R0 0B0 0U", "1F0 1R0 1B0 1U"))
    check_table(table("0F0 1F0 1B0 0R0 0B0 1U 0U", placement="0 0"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (table("0F0", "1F0", num_micro_batches=0), "num_stages is 2 and num_micro_batches is 0"),
        (table("0F0", "1F0", num_stages=3), "placement is of 2 stages and the table of 3"),
        (table("0F0 1F0", placement="0 1"), "on 2 processes and the table has the actions of 1"),
        (table("0F0", "1F0 2F0"), "2F0 on process 1: the stages are 0 to 1"),
        (table("0F0", "1F0 1F1"), "1F1 on process 1: the micro-batches are 0 to 0"),
        (table("0F0 1F0", ""), "1F0 is on process 0, but stage 1 is placed on 1"),
        (table("0F0 0F0", "1F0"), "0F0 occurs twice on process 0"),
        (table("0F0", ""), "1F0 is missing from process 1"),
        (table("0F0 0U", "1F0 1B0 1U"), "0B0 is missing from process 0"),
        (table("0F0 0B0", "1F0 1B0 1U"), "0U is missing from process 0"),
        (table("0F0 0U", "1F0"), "0U without any backward"),
        (table("0F0 0R0", "1F0"), "0R0 without any backward"),
        (table("0B0 0F0 0U", "1F0 1B0 1U"), "0B0 comes before 0F0"),
        (table("0R0 0F0 0B0 0U", "1F0 1B0 1U"), "0R0 comes before 0F0"),
        (table("0F0 0B0 0R0 0U", "1F0 1B0 1U"), "0B0 comes before 0R0"),
        (table("0F0 0U 0B0", "1F0 1B0 1U"), "0U comes before 0B0"),
        (table("0F0 1F0 1B0 1U 0B0 0U", placement="0 0"), "0B0 comes after 1U on process 0: updates come last"),
        (table("0F0 0F1", "1F1 1F0", num_micro_batches=2), "1F1 takes the message of 0F0"),
        (
            table("0F0 0F1 0B0 0B1 0U", "1F0 1F1 1B1 1B0 1U", num_micro_batches=2),
            "0B0 takes the message of 1B1: stage 0 must receive in the order in which stage 1 sends",
        ),
        (table("1F0 0F0", placement="0 0"), "deadlock: process 0 stops at 1F0, waiting for 0F0"),
        (table("0F0 1F0 0B0 1B0 0U 1U", placement="0 0"), "deadlock: process 0 stops at 0B0, waiting for 1B0"),
    ],
)
def test_a_broken_table_is_refused_by_name(broken: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_table(broken)


def test_processes_that_wait_for_each_other() -> None:
    crossed = table("2F0 0F0", "1F0", num_stages=3, placement="0 1 0")
    message = "deadlock: process 0 stops at 2F0, waiting for 1F0; process 1 stops at 1F0, waiting for 0F0"
    with pytest.raises(ScheduleError, match=message):
        check_table(crossed)


def built() -> st.SearchStrategy[Schedule]:
    return schedules().map(lambda case: case[0])


def with_actions(schedule: Schedule, process: int, actions: list[Action]) -> Schedule:
    changed = list(schedule.actions)
    changed[process] = tuple(actions)
    return replace(schedule, actions=tuple(changed))


@given(built(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_table_lacks_every_action_but_a_recomputation(schedule: Schedule, data: st.DataObject) -> None:
    process = data.draw(st.integers(0, len(schedule.actions) - 1))
    actions = list(schedule.actions[process])
    dropped = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    broken = with_actions(schedule, process, actions)
    if dropped.kind == RECOMPUTE:
        check_table(broken)
        assert broken.keeps_graph(dropped.stage, dropped.micro_batch or 0)
    elif schedule.num_stages * schedule.num_micro_batches == 1 and dropped.kind == BACKWARD:
        with pytest.raises(ScheduleError, match="without any backward"):
            check_table(broken)
    elif dropped.kind.is_optional and not any(kind.is_optional for kind in broken.kinds):
        check_table(broken)
    else:
        with pytest.raises(ScheduleError, match=f"{dropped} is missing"):
            check_table(broken)


@given(built(), st.data())
@settings(deadline=None, max_examples=60)
def test_no_action_fits_another_process_or_a_second_time(schedule: Schedule, data: st.DataObject) -> None:
    process = data.draw(st.integers(0, len(schedule.actions) - 1))
    action = data.draw(st.sampled_from(schedule.actions[process]))
    other = data.draw(st.integers(0, len(schedule.actions) - 1))
    broken = with_actions(schedule, other, [*schedule.actions[other], action])
    message = "twice" if other == process else "is placed on"
    with pytest.raises(ScheduleError, match=f"{action} .*{message}"):
        check_table(broken)


@given(built(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_backward_never_comes_before_its_forward_or_recomputation(schedule: Schedule, data: st.DataObject) -> None:
    if not schedule.is_training:
        return
    process = data.draw(st.integers(0, len(schedule.actions) - 1))
    actions = list(schedule.actions[process])
    backward = data.draw(st.sampled_from([action for action in actions if action.kind.takes_gradient]))
    needed = Action(RECOMPUTE, backward.stage, backward.micro_batch)
    if needed not in actions:
        needed = Action(FORWARD, backward.stage, backward.micro_batch)
    i, j = actions.index(needed), actions.index(backward)
    actions[i], actions[j] = actions[j], actions[i]
    with pytest.raises(ScheduleError, match="which it needs"):
        check_table(with_actions(schedule, process, actions))
