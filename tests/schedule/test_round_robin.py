"""Stages that are dealt to workers: tables of round_robin, what is wrong in others, and how long they take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.round_robin import deal_of, dealt_table
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.modes.visits.visit import DROP, LOAD, last_drops, visits
from hf_gpipe.schedule import Costs, Placement, Schedule, build, check_table, draw_text, placement_for, simulate
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, Held
from hf_gpipe.schedule.messages import messages
from hf_gpipe.schedule.occupancy import most_of_equal_stages
from hf_gpipe.schedule.updates import updates_beside, with_updates_last


def beside_of(table: Schedule) -> Schedule:
    """The table with updates beside backwards."""
    made = updates_beside(table)
    assert made is not None
    return made


def dealt(num_stages: int, num_micro_batches: int, num_workers: int, replicas: int = 1) -> Schedule:
    placement = placement_for("round_robin", num_stages, num_workers * replicas, replicas)
    return build("round_robin", num_stages, num_micro_batches, placement)


def test_the_text_and_the_picture_of_a_table() -> None:
    table = dealt(4, 2, 2)
    assert str(table).splitlines()[4:] == [
        "placement: 0 1 0 1",
        "dealt: yes",
        "process 0: 0L 1L 2L 0F0 1F0 2F0 0F1 1F1 2F1 0D 1D 0L1 2R0 2B0 2R1 2B1 2D 0R0 0B0 0R1 0B1 0D1 0U 2U",
        "process 1: 3L 1L1 3F0 3B0 3F1 3B1 3D 1R0 1B0 1R1 1B1 1D1 1U 3U",
    ]
    assert Schedule.from_text(str(table)) == table
    assert draw_text(simulate(table, Costs(1, 2))).splitlines() == [
        "process 0  0F0 1F0 2F0 0F1 1F1 2F1 2R0 2B0 --- 2R1 2B1 --- 0R0 0B0 --- 0R1 0B1 ---",
        "process 1  ... ... ... 3F0 3B0 --- 3F1 3B1 --- 1R0 1B0 --- 1R1 1B1 --- ... ... ...",
        "total 18 s, bubble 16.7%",
    ]
    # A recomputation on another worker than its forward receives the same inputs.
    sent = {(str(one.source), str(one.consumer)) for one in messages(table)}
    assert sent >= {("2F0", "3F0"), ("0F0", "1R0"), ("3B0", "2B0")}
    assert ("1F0", "2R0") not in sent


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 20), st.integers(1, 2), st.data())
def test_every_table_has_two_slots_of_weights_on_a_device(
    num_stages: int, num_workers: int, num_micro_batches: int, replicas: int, data: st.DataObject
) -> None:
    num_workers = min(num_workers, num_stages)
    shares = data.draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages))
    placement = placement_for("round_robin", num_stages, num_workers * replicas, replicas)
    backward = [2 * share for share in shares]
    deal = deal_of(placement, num_micro_batches, shares, shares, backward)
    table = dealt_table(placement, num_micro_batches, deal)
    check_table(table)
    assert Schedule.from_text(str(table)) == table
    assert max(most_loaded(table)) <= 2 * max(len(slot.stages) for slot in deal.slots)
    if replicas == 1:
        check_updates_beside(table, shares, backward)
    # Each worker's backwards of a stage add to gradients that the visit before has left.
    timeline = simulate(table, Costs(shares, backward, others={LOAD: 1, DROP: 1}))
    work = sum(3 * one for one in shares) + sum(shares[: deal.together.start])
    assert timeline.total_seconds >= num_micro_batches * work / (num_workers * replicas)
    for stage in range(num_stages):
        assert most_of_equal_stages(table)[stage][Held.GRAPH] == 1


def check_updates_beside(table: Schedule, shares: list[int], backward: list[int]) -> None:
    """An update on the host begins when the gradients of its stage, and of those after it, are on the host."""
    beside = beside_of(table)
    check_table(beside)
    assert Schedule.from_text(str(beside)) == beside
    assert with_updates_last(beside) == table
    costs = Costs(shares, backward, update_seconds=7, others={LOAD: 1, DROP: 2})
    timeline, last = simulate(beside, costs), simulate(table, costs)
    assert last.total_seconds - 7 * table.num_stages <= timeline.total_seconds <= last.total_seconds
    ends = {span.action: span.end for span in timeline.spans}
    for process, row in enumerate(beside.actions):
        own = [span for span in timeline.spans if span.process == process and span.action.kind == HOST_UPDATE]
        assert sorted(span.action.stage for span in own) == list(table.placement.stages_of(process))
        assert all(one.end <= other.start for one, other in pairwise(own))
        assert row[-1].kind == HOST_UPDATE
        for span in own:
            assert span.start >= max(ends[d] for stage, d in last_drops(beside).items() if stage >= span.action.stage)


def test_updates_hide_beside_backwards() -> None:
    table = dealt(16, 32, 4)
    costs = Costs(1, 2, update_seconds=16)
    free, last, beside = (
        simulate(*one).total_seconds for one in ((table, Costs(1, 2)), (table, costs), (beside_of(table), costs))
    )
    assert last - free == 4 * 16
    # The lowest stages have no backwards after theirs.
    assert beside - free <= 1.5 * 16
    assert updates_beside(dealt(4, 2, 2, replicas=2)) is None, "the gradients of replicas are summed at the end"
    picture = draw_text(simulate(beside_of(dealt(4, 2, 2)), Costs(1, 2, update_seconds=1))).splitlines()
    assert picture[0].endswith("0R0 0B0 --- 0R1 0B1 --- 0H"), "2H is beside 0R0"


@pytest.mark.parametrize(
    ("word", "instead", "problem"),
    [
        ("2H 0R0", "0R0", "2U is missing from process 0; a training step"),
        ("2H 0R0", "2U 0R0", "0R0 comes after 2U on process 0: updates come last"),
        ("0D1 0H", "0H 0D1", "0D1 comes after 0H on process 0; move it before"),
        ("2D 2H", "2H 2D", "2D comes after 2H on process 0; move it before"),
        ("0B1 0D1 0H", "0B1 0H 0D1", "0D1 comes after 0H"),
        ("1D1 1H", "1H 1D1", "1D1 comes after 1H on process 1"),
    ],
)
def test_what_is_wrong_with_updates_on_the_host(word: str, instead: str, problem: str) -> None:
    text = str(beside_of(dealt(4, 2, 2)))
    assert word in text
    with pytest.raises(ScheduleError, match=problem):
        check_table(Schedule.from_text(text.replace(word, instead, 1)))


def test_updates_are_shared_out_by_size() -> None:
    placement = placement_for("round_robin", 6, 3)
    assert placement.balanced([1] * 6) == placement
    assert str(placement.balanced([9, 1, 1, 1, 1, 8])) == "0 2 2 2 2 1"
    assert str(placement.balanced([0] * 6)) == "0 1 2 0 1 2"
    pairs = placement_for("round_robin", 3, 4, 2).balanced([5, 1, 3])
    assert pairs.workers == ((0, 2), (1, 3), (1, 3))
    plain = Placement.spread(4, 2)
    assert plain.balanced([4, 3, 2, 1]) is plain


def test_a_heavy_head_binds_no_worker() -> None:
    """16 stages on 4 workers, the last five times as long as the others, against an interleaved pipeline."""
    shares = [1] * 15 + [5]
    backward, costs = [2 * share for share in shares], Costs(shares, [2 * share for share in shares])
    placement = placement_for("round_robin", 16, 4)
    table = dealt_table(placement, 32, deal_of(placement, 32, shares, shares, backward))
    others = build("interleaved_1f1b", 16, 32, placement_for("interleaved_1f1b", 16, 4), "stage")
    found, expected = simulate(table, costs), simulate(others, costs)
    assert expected.total_seconds / found.total_seconds > 1.35
    assert found.bubble < 0.07
    assert simulate(dealt(16, 32, 4), Costs(1, 2)).bubble < 0.02


def test_gradients_are_handed_over_between_visits() -> None:
    table = dealt(5, 12, 2)
    last = [visit for worker in range(2) for visit in visits(table, worker) if visit.load.stage == 0]
    backwards = [visit for visit in last if any(one.kind == BACKWARD for one in visit.actions)]
    assert len(backwards) > 1
    handed = {(one.source, one.consumer) for one in messages(table) if one.source.kind == DROP}
    assert handed
    for drop, backward in handed:
        assert drop.stage == backward.stage
        assert backward.kind == BACKWARD
        assert table.worker_of(drop) != table.worker_of(backward)


@pytest.mark.parametrize(
    ("word", "instead", "problem"),
    [
        ("3L 1L1", "1L1", "3F0 without an L of stage 3, which is dealt"),
        ("2R0 2B0", "2B0 2R0", "2D comes while stage 2 holds an autograd graph"),
        ("1R0 ", "", "1B0 finds no graph on process 1: its forward is on another one; write R"),
        ("3F0 3B0", "3F0", "3B0 stands on 0 of the processes"),
        ("0D 1D", "0D3 1D", "0D3 is not the next L or D of stage 0"),
        ("1L1", "1L", "1L is on processes 0 and 1: visits of a shared stage are numbered"),
        ("dealt: yes\n", "", "is on process 1, but stage 2 is placed on|is on process 0, but stage 1 is placed on 1"),
        ("1U 3U", "1U", "3U is missing from process 1"),
    ],
)
def test_what_is_wrong_in_a_table(word: str, instead: str, problem: str) -> None:
    text = str(dealt(4, 2, 2))
    assert word in text
    changed = text.replace(word, instead, 1).replace("1D1", "1D" if word == "1L1" else "1D1")
    with pytest.raises(ScheduleError, match=problem):
        check_table(Schedule.from_text(changed))


def test_what_cannot_be_dealt() -> None:
    with pytest.raises(ScheduleError, match="round_robin' recomputes"):
        build("round_robin", 4, 2, placement_for("round_robin", 4, 2), "none")
    with pytest.raises(ScheduleError, match="its stages have workers of their own"):
        build("round_robin", 4, 2, Placement.spread(4, 2))
    with pytest.raises(ScheduleError, match="no order for rows that are cut"):
        build("round_robin", 4, 4, placement_for("round_robin", 4, 2), group_size=2)
    with pytest.raises(ScheduleError, match="5 workers: every worker updates one"):
        placement_for("round_robin", 4, 5)
    with pytest.raises(ScheduleError, match="no worker is of two"):
        Placement([(0, 1), (1, 0)], is_shared=True)
    table = dealt(4, 2, 2)
    with pytest.raises(ScheduleError, match="its rows are whole"):
        check_table(replace(table, placement=replace(table.placement, group_size=2)))
    with pytest.raises(ScheduleError, match="found 'no', expected yes"):
        Schedule.from_text(str(table).replace("dealt: yes", "dealt: no"))
    assert FORWARD in table.kinds
