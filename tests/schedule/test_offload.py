"""Graphs that wait on the host: where O and P stand in a table, what is wrong without them, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.host_graphs.table import AWAY, FEWEST_GRAPHS, OFFLOAD, PREFETCH, with_offloads
from hf_gpipe.modes.visits.table import with_visits
from hf_gpipe.schedule import Costs, Schedule, build, check_table, draw_text, simulate
from hf_gpipe.schedule.builders import placement_for
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_held
from tests.schedule.cases import OWN, Recompute, peak, schedules


def table_of(schedule: str, num_stages: int, num_micro_batches: int) -> Schedule:
    placement = placement_for(schedule, num_stages, num_stages)
    table = build(schedule, num_stages, num_micro_batches, placement, "none")
    return with_offloads(table, frozenset(range(num_stages)))


def test_the_text_of_a_table() -> None:
    table = table_of("gpipe", 1, 5)
    assert f"{table}".splitlines()[-1] == (
        "process 0: 0F0 0O0 0F1 0O1 0F2 0O2 0F3 0F4 0B4 0P2 0B3 0P1 0B2 0P0 0B1 0B0 0U"
    )
    check_table(table)
    assert Schedule.from_text(f"{table}") == table
    drawn = draw_text(simulate(table, Costs(1, 2, others={OFFLOAD: 2, PREFETCH: 1})))
    assert "F0 F1 O0 F2 O1 F3 F4 B4 -- B3 --" in drawn, "copies are drawn where nothing computes"


@settings(deadline=None, max_examples=60)
@given(schedules(OWN), st.sets(st.integers(0, 5)), st.sampled_from([0.5, 1, 4]))
def test_any_table_can_have_them(case: tuple[Schedule, Recompute], stages: set[int], seconds: float) -> None:
    """Nothing else moves, and a device has three graphs of a stage at once; four where backwards change their order."""
    given_table, _ = case
    num_stages, count, placement = given_table.num_stages, given_table.num_micro_batches, given_table.placement
    plain = build(
        given_table.name, num_stages, count, replace(placement, group_size=1), "none", group_size=placement.group_size
    )
    own = frozenset(stage for stage in stages if stage < num_stages)
    table = with_offloads(plain, own)
    check_table(table)
    kept = tuple(tuple(one for one in row if one.kind not in (OFFLOAD, PREFETCH)) for row in table.actions)
    assert replace(table, actions=kept) == plain
    if not table.is_training:
        assert table == plain
        return
    free = simulate(table, Costs(1, 2, transfer_seconds=1))
    assert free.total_seconds == simulate(plain, Costs(1, 2, transfer_seconds=1)).total_seconds
    timeline = simulate(table, Costs(1, 2, transfer_seconds=1, others={OFFLOAD: seconds, PREFETCH: seconds}))
    assert timeline.total_seconds >= free.total_seconds
    for stage in range(num_stages):
        most = most_held(timeline, stage)
        if stage in own:
            assert most[Held.GRAPH] <= FEWEST_GRAPHS + 1
        else:
            assert (most[Held.GRAPH] > 0, most[AWAY]) == (True, 0)


def test_what_is_gained() -> None:
    """Under 1f1b, nothing is lost where a copy takes no longer than F and B; under gpipe, no longer than F."""
    for seconds, same in ((3, True), (4, False)):
        costs = Costs(1, 2, others={OFFLOAD: seconds, PREFETCH: seconds})
        timeline = simulate(table_of("1f1b", 8, 32), costs)
        assert [most_held(timeline, stage)[Held.GRAPH] for stage in range(8)] == [3] * 6 + [2, 1]
        assert [most_held(timeline, stage)[AWAY] for stage in (0, 4, 5)] == [7, 3, 0]
        plain = simulate(build("1f1b", 8, 32, None, "none"), costs).total_seconds
        assert (timeline.total_seconds == plain) is same
    assert peak(build("1f1b", 8, 32, None, "none"), 0, Held.GRAPH) == 8
    plain = simulate(build("gpipe", 8, 32, None, "none"), Costs(1, 2)).total_seconds
    for leaves, same in ((1, True), (1.5, False)):
        costs = Costs(1, 2, others={OFFLOAD: leaves, PREFETCH: 2})
        assert (simulate(table_of("gpipe", 8, 32), costs).total_seconds == plain) is same


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" 0P1", "", "0B1 on process 0: a graph goes to the host by O, after its F, and comes back by P"),
        (" 0O1", "", "0P1 on process 0: a graph goes to the host"),
        ("0P1 0B2", "0B2 0R1", "0R1 on process 0: .* and no R"),
        ("0F1 0O1", "0O1 0F1", "0O1 on process 0: a graph goes"),
        ("0P1 0B2 0P0 0B1", "0B2 0P0 0B1 0P1", "0B1 on process 0: a graph goes"),
    ],
)
def test_a_table_that_cannot_be_run(old: str, new: str, message: str) -> None:
    text = table_of("gpipe", 1, 5).text()
    assert old in text
    with pytest.raises(ScheduleError, match=message):
        check_table(Schedule.from_text(text.replace(old, new)))


def test_weights_cannot_visit_beside_them() -> None:
    with pytest.raises(ScheduleError, match="graphs that go to the host keep weights, which then cannot visit"):
        check_table(with_visits(table_of("gpipe", 1, 5)))
    assert not table_of("1f1b", 3, 8).kinds & {OFFLOAD, PREFETCH}, "no stage has more than three graphs"
