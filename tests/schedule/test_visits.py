"""Weights that visit their device: where L and D stand in a table, what is wrong without them, and what they cost."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.visits.table import check_visits, most_loaded, stages_that_stay, with_late_updates, with_visits
from hf_gpipe.modes.visits.visit import DROP, LOAD, visits
from hf_gpipe.schedule import Costs, Placement, Schedule, build, check_table, draw_text, simulate
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.builders import placement_for
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_held
from tests.schedule.cases import OWN, VOCABULARY, Recompute, schedules


def breadth_first(num_stages: int, num_micro_batches: int, num_processes: int = 1) -> Schedule:
    placement = placement_for("breadth_first", num_stages, num_processes)
    return build("breadth_first", num_stages, num_micro_batches, placement)


def test_the_text_of_a_table() -> None:
    table = with_visits(breadth_first(6, 2, 2))
    assert f"{table}".splitlines()[-2:] == [
        "process 0: 0L 2L 0F0 0F1 0D 4L 2F0 2F1 2D 2L1 4F0 4F1 4R0 4B0 4R1 4B1 4D 0L1 2R0 2B0 2R1 2B1 2D1 0R0 0B0 0R1 "
        "0B1 0D1 0U 2U 4U",
        "process 1: 1L 3L 1F0 1F1 1D 5L 3F0 3F1 3D 3L1 5F0 5B0 5F1 5B1 5D 1L1 3R0 3B0 3R1 3B1 3D1 1R0 1B0 1R1 1B1 1D1 "
        "1U 3U 5U",
    ]
    assert Schedule.from_text(f"{table}") == table
    assert with_visits(table) is table


def test_late_updates() -> None:
    """At the head of a row, and each load of a stage waits for its own."""
    table = with_late_updates(with_visits(breadth_first(6, 2, 2)))
    check_table(table)
    assert with_late_updates(table) is table
    assert Schedule.from_text(f"{table}") == table
    rows = f"{table}".splitlines()[-2:]
    assert rows[0].startswith("process 0: 0A 2A 4A 0L 2L 0F0 0F1 0D 4L 2F0")
    assert rows[1].startswith("process 1: 1A 3A 5A 1L 3L 1F0")
    assert rows[1].endswith("1D1 1U 3U 5U")
    timeline = simulate(table, Costs(1, 2, others={"A": 3}))
    starts = {f"{span.action}": (span.start, span.end) for span in timeline.spans}
    assert [starts[word] for word in ("0A", "2A", "4A", "0F0")] == [(0, 3), (3, 6), (6, 9), (3, 4)]
    # The stages 0 and 1 run while 2 and 3 are updated, and these while 4 and 5 are.
    assert [starts[word][0] for word in ("1F0", "2F0", "3F0", "4F0")] == [4, 6, 7, 9]
    assert timeline.total_seconds == simulate(table, Costs(1, 2)).total_seconds + 9 - 2 * 2
    with pytest.raises(ScheduleError, match="0L comes before 0A, which it needs, on process 0"):
        check_table(Schedule.from_text(f"{table}".replace("0A 2A 4A 0L", "2A 4A 0L 0A")))
    with pytest.raises(ScheduleError, match="1A on process 1: A updates a stage that this process alone loads"):
        check_table(
            with_visits(breadth_first(6, 2, 2), frozenset({1})).from_text(
                f"{with_visits(breadth_first(6, 2, 2), frozenset({1}))}".replace("process 1: ", "process 1: 1A ")
            )
        )


@settings(deadline=None)
@given(schedules(tuple(name for name in OWN if name not in VOCABULARY)))
def test_any_table_can_have_visits(case: tuple[Schedule, Recompute]) -> None:
    plain, _ = case
    table = with_visits(plain)
    check_table(table)
    kept = tuple(tuple(one for one in row if not one.kind.is_numbered) for row in table.actions)
    if plain.is_training:
        assert replace(table, actions=kept) == plain
    for worker in range(len(table.actions)):
        own = visits(table, worker)
        covered = [action for visit in own for action in visit.actions]
        assert sorted(covered) == sorted(one for one in table.actions[worker] if one.micro_batch is not None)
    # A visit costs no time where copies cost none, and no table is shorter with copies.
    # A visit takes the buffer that has been free for longest.
    for worker, row in enumerate(table.actions):
        after = {visit.load: visit.after for visit in visits(table, worker)}
        free: deque[Action | None] = deque([None] * most_loaded(table)[worker])
        for action in row:
            if action.kind == LOAD:
                assert after[action] == free.popleft()
            elif action.kind == DROP:
                free.append(action)
    costs = Costs(1, 2, transfer_seconds=1)
    if plain.is_training:
        assert simulate(table, costs).total_seconds == simulate(plain, costs).total_seconds
    slow = replace(costs, others={LOAD: 3, DROP: 1})
    assert simulate(table, slow).total_seconds >= simulate(table, costs).total_seconds


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(3, 5), st.integers(1, 4))
def test_breadth_first_has_two_stages_on_a_device_and_each_visits_twice(
    num_processes: int, stages_each: int, num_micro_batches: int
) -> None:
    table = with_visits(breadth_first(num_processes * stages_each, num_micro_batches, num_processes))
    assert most_loaded(table) == (2,) * num_processes
    check_visits(table)
    for worker in range(num_processes):
        # The last stages of all turn from forward to backward at once.
        assert len(visits(table, worker)) == 2 * stages_each - 1
    forwards = with_visits(build("forward_only", table.num_stages, num_micro_batches, table.placement))
    assert len(visits(forwards, 0)) == stages_each


def test_where_nothing_would_be_gained() -> None:
    keeping = with_visits(build("breadth_first", 6, 2, placement_for("breadth_first", 6, 1), "none"))
    assert most_loaded(keeping) == (6,), "a graph may keep weights"
    two_devices = build("breadth_first", 4, 2, Placement([0] * 4, ["cuda:0", "cuda:1"] * 2))
    for table in (keeping, with_visits(breadth_first(4, 2, 2)), with_visits(two_devices)):
        with pytest.raises(ScheduleError, match=r"offload_weights .* all stages of a device .* three stages for each"):
            check_visits(table)
    windows = build("pipedream", 2, 4, steps=[2, 2])
    with pytest.raises(ScheduleError, match="'pipedream' updates weights within a table"):
        _ = with_visits(windows)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("0L 1L", "1L", "0F0 comes while the weights of stage 0 are on the host"),
        ("0D 2L", "2L", "0L1 is not the next L or D of stage 0: they alternate"),
        ("0D 2L", "2L 0D 0D3", "0D3 is not the next L or D of stage 0"),
        ("0D1 ", "", "0L1 has no D"),
        ("0R1 0B1 0D1", "0R1 0D1 0B1", "0D1 comes while stage 0 holds an autograd graph"),
        ("0L1 1R0", "0L2 1R0", "0L2 is not the next L or D of stage 0"),
        ("0D1 0U", "0U 0D1", "0D1 comes after 0U on process 0: updates come last"),
    ],
)
def test_a_table_with_wrong_visits(old: str, new: str, problem: str) -> None:
    text = f"{with_visits(breadth_first(3, 2))}"
    assert text.count(old) == 1
    with pytest.raises(ScheduleError, match=problem) as error:
        check_table(Schedule.from_text(text.replace(old, new)))
    assert error.value.line == "process 0"


def test_copies_run_beside_the_actions_and_wait_for_room() -> None:
    table = with_visits(breadth_first(3, 1))
    spans = {f"{span.action}": (span.start, span.end) for span in simulate(table, Costs(2, 4, others={LOAD: 3})).spans}
    # The first load is waited for; the second runs beside stage 0; the third has room once stage 0 is dropped.
    assert spans["0L"] == (0, 3)
    assert spans["1L"] == (3, 6)
    assert spans["0F0"] == (3, 5)
    assert spans["0D"] == (5, 5)
    assert spans["2L"] == (6, 9)
    assert spans["1F0"] == (6, 8)
    assert spans["2F0"] == (9, 11)
    text = draw_text(simulate(table, Costs(2, 4, others={LOAD: 2})))
    assert text.splitlines()[0].startswith("stage 0  L")


def test_gradients_leave_one_visit_after_another() -> None:
    """Weights leave room when the device is done with them; their gradients take longer, and leave one by one."""
    timeline = simulate(with_visits(breadth_first(4, 1)), Costs(2, 4, others={LOAD: 3, DROP: 9}))
    spans = {f"{span.action}": (span.start, span.end) for span in timeline.spans}
    assert [spans[drop] for drop in ("0D", "1D", "2D")] == [(5, 5), (8, 8), (11, 11)], "forwards make no gradients"
    assert spans["3B0"] == (14, 18)
    assert [spans[drop] for drop in ("3D", "2D1", "1D1", "0D1")] == [(18, 27), (27, 36), (36, 45), (45, 54)]
    assert spans["1L1"] == (18, 21)
    assert spans["2R0"] == (18, 20)
    assert spans["2B0"] == (20, 24), "beside the copy of the gradients of stage 3"
    assert spans["1R0"] == (27, 29), "once these have left"
    assert spans["0U"] == (54, 54)
    left = {f"{action}": end for (_, action), end in timeline.left_at.items()}
    assert left == {"3D": 27, "2D1": 36, "1D1": 45, "0D1": 54}
    held = most_held(timeline, 2)
    assert held[Held.LEAVING_GRADIENTS] == 1


def test_placements_with_replicas_and_devices() -> None:
    placement = Placement.interleaved(6, 2).replicated(2)
    table = with_visits(build("breadth_first", 6, 4, placement))
    assert most_loaded(table) == (2,) * 4
    devices = Placement([0] * 6, ["cuda:0", "cuda:1"] * 3)
    check_table(spread := with_visits(build("breadth_first", 6, 4, devices)))
    assert most_loaded(spread) == (2,)
    assert all(visit.after is None or visit.after.stage % 2 == visit.load.stage % 2 for visit in visits(spread, 0))


def test_stages_that_stay() -> None:
    """They have no L and D, and let the weights of a stage come during two stages' work."""
    plain = breadth_first(4, 2)
    assert [sorted(stages_that_stay(plain.placement, count)) for count in range(4)] == [[], [3], [1, 3], [1, 2, 3]]
    table = with_visits(plain, stages_that_stay(plain.placement, 1))
    check_table(table)
    check_visits(table)
    assert " ".join(map(str, table.actions[0][:-4])) == (
        "0L 1L 0F0 0F1 0D 2L 1F0 1F1 1D 1L1 2F0 2F1 3F0 3B0 3F1 3B1 2R0 2B0 2R1 2B1 2D 0L1 1R0 1B0 1R1 1B1 1D1 0R0 0B0 "
        "0R1 0B1 0D1"
    ), "stage 2 is there while stage 3 works"
    two = breadth_first(8, 2, 2)
    assert sorted(stages_that_stay(two.placement, 1)) == [6, 7]
    with pytest.raises(
        ScheduleError, match=r"at once \(2 of 2\); give at least three stages that visit for each device"
    ):
        check_visits(with_visits(plain, stages_that_stay(plain.placement, 2)))
