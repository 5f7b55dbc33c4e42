"""Tables of list scheduling in which a stage recomputes single micro-batches: valid, within their limit, and short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_gpipe.schedule import Action, Costs, Placement, Schedule, check_table, simulate
from hf_gpipe.schedule.kinds import RECOMPUTE, UPDATE, Held
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.occupancy import occupancy

#: A graph takes 16, of which a received input is 1, and what W needs 10.
GRAPH, RECEIVED, DEFERRED = 16, 1, 10


def work_of(num_stages: int, *, has_big_head: bool) -> Work:
    """F, I and W of 10, 11 and 9 seconds, of a big head of 8, 23 and 7."""
    others = num_stages - has_big_head
    forward, backward, weight = (
        [usual] * others + [last] * has_big_head for usual, last in ((10, 8), (11, 23), (9, 7))
    )
    every = [1] * num_stages
    held, deferred, received = ([size * one for one in every] for size in (GRAPH, DEFERRED, RECEIVED))
    return Work(forward, backward, weight, held, deferred, [0] * (num_stages - 1), forward, received)


def made(placement: Placement, count: int, work: Work, limits: list[int], effort: int) -> tuple[float, Schedule]:
    found = best_listed(placement, count, work, limits, effort=effort)
    rows = [
        (*order, *(Action(UPDATE, stage) for stage in placement.stages_of(process)))
        for process, order in enumerate(found.orders)
    ]
    table = Schedule("made", placement.num_stages, count, placement, tuple(rows))
    check_table(table)
    return found.seconds, table


@pytest.mark.parametrize(
    ("num_stages", "has_big_head", "limit", "optimum"),
    # By integer programming, as in scripts/bench_tables.py.
    [(3, False, 24, 243), (3, True, 32, 265), (4, False, 32, 314)],
)
def test_a_search_finds_a_table_near_the_optimum(num_stages: int, has_big_head: bool, limit: int, optimum: int) -> None:
    placement, work = Placement.one_stage_each(num_stages), work_of(num_stages, has_big_head=has_big_head)
    seconds, table = made(placement, 2 * num_stages, work, [limit] * num_stages, effort=60_000)
    assert optimum <= seconds <= 1.05 * optimum
    assert made(placement, 2 * num_stages, work, [limit] * num_stages, effort=60_000) == (seconds, table)
    costs = Costs(work.forward_seconds, 0, input_seconds=work.input_seconds, weight_seconds=work.weight_seconds)
    timeline = simulate(table, costs)
    assert timeline.total_seconds == seconds
    assert 0 < sum(table.num_actions(stage, RECOMPUTE) for stage in range(num_stages)) < 2 * num_stages * num_stages
    parts = {Held.GRAPH: {"bytes": GRAPH - RECEIVED}, Held.DEFERRED: {"bytes": DEFERRED}}
    for process in range(num_stages):
        steps = list(occupancy(timeline, {process: parts}, process))
        assert max(level["bytes"] for _, level in steps) <= limit


def test_tables_of_several_stages_a_process_run_to_their_end() -> None:
    """Whatever the rules: a deeper stage always finds room."""
    for placement in (Placement.v_shaped(6, 3), Placement.interleaved(6, 2)):
        room = [GRAPH * len(placement.stages_of(process)) for process in range(placement.num_processes)]
        for count in (1, 5):
            work = work_of(6, has_big_head=True)
            _, table = made(placement, count, work, room, effort=5_000)
            assert table.num_micro_batches == count


def test_without_recomputation_there_is_none() -> None:
    placement = Placement.one_stage_each(3)
    plain = replace(work_of(3, has_big_head=False), recompute_seconds=None)
    seconds, table = made(placement, 6, plain, [2 * GRAPH] * 3, effort=20_000)
    assert not any(table.num_actions(stage, RECOMPUTE) for stage in range(3))
    assert seconds >= 225
