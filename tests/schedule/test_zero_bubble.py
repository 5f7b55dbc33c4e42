"""The schedules with a split backward against the papers' formulas, and list scheduling against all tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import (
    Costs,
    Placement,
    Schedule,
    build,
    draw_text,
    placement_for,
    seconds_of_steps,
    simulate,
    training_schedules,
)
from hf_gpipe.schedule.kinds import RECOMPUTE, Held
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.occupancy import most_of_equal_stages, occupancy

ONE = Fraction(1)
EQUAL = Costs(ONE, 2 * ONE)


def table(name: str, processes: int, micro_batches: int) -> Schedule:
    """Of so many processes, nothing recomputed."""
    num_stages = processes * (2 if name in ("zb_v", "v_half") else 1)
    return build(name, num_stages, micro_batches, placement_for(name, num_stages, processes), "none")


def seconds(name: str, processes: int, micro_batches: int) -> Fraction:
    return Fraction(simulate(table(name, processes, micro_batches), EQUAL).total_seconds)


def held(schedule: Schedule) -> int:
    """The most (stage, micro-batch) pairs between F and W that any process holds."""
    most = 0
    for process in range(schedule.placement.num_processes):
        own = {stage: {Held.MICRO_BATCH: {"pairs": 1}} for stage in schedule.placement.stages_of(process)}
        most = max(most, *(int(level["pairs"]) for _, level in occupancy(simulate(schedule, EQUAL), own, process)))
    return most


@pytest.mark.parametrize("K", [1, 2, 3, 6])
def test_the_bubble_and_the_memory_are_those_of_the_formulas(K: int) -> None:
    for M in (K, 2 * K - 1, 2 * K + 3):
        assert seconds("zb_h1", K, M) == 3 * M + K - 1
        assert held(table("zb_h1", K, M)) <= K
        # Twice as many stages, each of the same seconds as above.
        assert seconds("zb_v", K, M) == 6 * M + K - 1
        assert held(table("zb_v", K, M)) <= 2 * K
        assert seconds("v_half", K, M) <= 6 * M + 3 * K
        assert held(table("v_half", K, M)) <= K + 2
        assert seconds("zb_h2", K, M) == 3 * M + K - 1
        assert held(table("zb_h2", K, M)) <= 2 * K - 1
    M = 2 * K
    assert seconds_of_steps(table("zb_h2", K, M), EQUAL, 20) == 60 * M + K - 1
    assert seconds_of_steps(table("zb_h1", K, M), EQUAL, 20) == 20 * (3 * M + K - 1)
    assert seconds_of_steps(table("1f1b", K, M), EQUAL, 20) == 20 * 3 * (M + K - 1)


def test_the_speed_ups_that_the_schedules_promise() -> None:
    """8 processes, 32 micro-batches, over one process."""
    assert float(8 * 96 / seconds("zb_h1", 8, 32)) == pytest.approx(7.456, abs=1e-3)
    assert float(8 * 192 / seconds("zb_v", 8, 32)) == pytest.approx(7.719, abs=1e-3)
    assert float(8 * 96 * 20 / seconds_of_steps(table("zb_h2", 8, 32), EQUAL, 20)) == pytest.approx(7.971, abs=1e-3)


def test_few_micro_batches_take_no_longer_than_the_way_of_the_last_one() -> None:
    for name, K, M in product(("zb_h1", "zb_h2", "zb_v", "v_half"), (1, 2, 4), (1, 2)):
        of_process = 6 if name in ("zb_v", "v_half") else 3
        schedule = table(name, K, M)
        # The way of one micro-batch, then the others' work.
        assert simulate(schedule, EQUAL).total_seconds <= 2 * schedule.num_stages + 1 + of_process * M


def test_what_stays_whole() -> None:
    """B where W follows I at once and no other process waits for I: always on the first stage of zb_h1."""
    schedule = table("zb_h1", 3, 5)
    assert not [pair for pair in schedule.split if pair[0] == 0]
    assert not table("zb_v", 1, 4).split
    assert most_of_equal_stages(schedule)[0][Held.DEFERRED] == 0
    assert most_of_equal_stages(schedule)[2][Held.DEFERRED] == 3


def test_a_recomputation_comes_before_i() -> None:
    schedule = build("zb_h1", 3, 4, recompute="stage")
    own = " ".join(map(str, schedule.actions[1]))
    assert "1R0 1I0" in own
    assert [schedule.num_actions(stage, RECOMPUTE) for stage in range(3)] == [4, 4, 0]
    for name, K in (("zb_h1", 4), ("zb_h2", 4), ("zb_v", 8), ("v_half", 8)):
        limited = build(name, K, 6, placement_for(name, K, 4), (2,) * K)
        assert all(most[Held.GRAPH] <= 2 for most in most_of_equal_stages(limited))


def shortest(workers: tuple[int, ...], micro_batches: int, limit: int) -> int:
    """The ticks of the shortest of all tables: each state that can be reached in so many ticks, F, I and W of one tick.

    A state has the number of F, I and W that each stage has done.
    """
    num_stages = len(workers)

    def next_states(state: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Every process does one of its actions, or nothing."""
        choices: list[list[tuple[int, int] | None]] = [[None] for _ in range(max(workers) + 1)]
        for stage, (forwards, inputs, weights) in enumerate(state):
            own = [s for s in range(num_stages) if workers[s] == workers[stage]]
            if forwards < (state[stage - 1][0] if stage else micro_batches) and (
                sum(state[s][0] - state[s][2] for s in own) < limit
            ):
                choices[workers[stage]].append((stage, 0))
            if inputs < (state[stage + 1][1] if stage + 1 < num_stages else forwards):
                choices[workers[stage]].append((stage, 1))
            if weights < inputs:
                choices[workers[stage]].append((stage, 2))
        for chosen in product(*choices):
            changed = [list(counts) for counts in state]
            for one in chosen:
                if one is not None:
                    changed[one[0]][one[1]] += 1
            yield tuple((f, i, w) for f, i, w in changed)

    ticks, states = 0, {((0, 0, 0),) * num_stages}
    end = ((micro_batches,) * 3,) * num_stages
    while end not in states:
        ticks, states = ticks + 1, {after for state in states for after in next_states(state)}
    return ticks


@pytest.mark.parametrize(
    ("workers", "micro_batches", "limit", "longer"),
    [
        ((0, 1), 2, 2, 0),
        ((0, 1), 3, 2, 0),
        ((0, 1), 3, 3, 0),
        ((0, 1), 3, 1, 0),
        ((0, 1, 2), 2, 3, 0),
        ((0, 1, 1, 0), 2, 4, 0),
        ((0, 1, 1, 0), 2, 3, 1),
    ],
)
def test_list_scheduling_finds_the_shortest_of_all_tables(
    workers: tuple[int, ...], micro_batches: int, limit: int, longer: int
) -> None:
    """Or nearly."""
    placement = Placement(workers)
    work = Work.equal_stages(len(workers))
    found = best_listed(placement, micro_batches, work, [limit] * placement.num_processes)
    assert found.seconds == shortest(workers, micro_batches, limit) + longer


def test_the_page_of_schedules_draws_the_real_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == set(training_schedules())
    assert page.count("\nstage 0  ") == 3
    for name, processes, micro_batches in (("zb_h1", 3, 4), ("zb_v", 2, 4), ("vocab_1f1b", 3, 4)):
        costs = replace(EQUAL, others={"S": 1, "T": 2})
        drawn = draw_text(simulate(table(name, processes, micro_batches), costs))
        assert f"{drawn.strip()}\n" in page


def test_a_limit_without_room_for_one_micro_batch() -> None:
    with pytest.raises(ScheduleError, match="process 1 may hold 1, and one micro-batch in its stages takes 2"):
        best_listed(Placement.v_shaped(4, 2), 3, Work.equal_stages(4), [2, 1])
