"""Tables whose stages have replicas: every schedule, uniform and uneven, with one or several stages per worker."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import (
    V_SHAPED,
    Action,
    Costs,
    Placement,
    Schedule,
    breakdown,
    build,
    check_table,
    draw_text,
    placement_for,
    simulate,
)
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, RECOMPUTE, REDUCE, UPDATE, WEIGHT, Held
from hf_gpipe.schedule.occupancy import most_of_equal_stages
from tests.schedule.cases import OWN, VOCABULARY, Recompute, idle_seconds, recomputes

F, R, B, G, U = FORWARD, RECOMPUTE, BACKWARD, REDUCE, UPDATE

UNEVEN = ([2, 1], [1, 2], [1, 3], [3, 1, 2], [2, 2, 1], [4, 3, 2, 1])

ONE_TWO = """\
table: 10
schedule: 1f1b
num_stages: 2
num_micro_batches: 4
placement: 0,1 2
process 0: 0F0 0F2 0R0 0B0 0R2 0B2 0G 0U
process 1: 0F1 0F3 0R1 0B1 0R3 0B3 0G 0U
process 2: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1U
"""


@st.composite
def placements(draw: st.DrawFn, name: str) -> Placement:
    """Up to four replicas: of whole pipelines, with one or several stages per worker; of each stage by itself; and,
    for schedules that can be placed anywhere, workers that hold stages in any mixture."""
    kinds = {"interleaved_1f1b": ["uniform", "uneven"], **{one: ["uniform"] for one in V_SHAPED}}
    kind = draw(st.sampled_from(kinds.get(name, ["uniform", "uneven", "any"])))
    if kind == "uniform":
        of_replica, stages_each = draw(st.integers(1, 3)), draw(st.integers(1, 2)) if name not in V_SHAPED else 2
        replicas = draw(st.integers(1, 4))
        return placement_for(name, of_replica * stages_each, of_replica * replicas, replicas)
    if kind == "uneven":
        counts = draw(st.sampled_from(UNEVEN))
        return placement_for(name, len(counts), sum(counts), counts)
    workers = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=1, max_size=4))
    numbers = {process: number for number, process in enumerate(sorted({p for own in workers for p in own}))}
    return Placement([[numbers[process] for process in own] for own in workers])


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schedule, Recompute]:
    name = draw(st.sampled_from(sorted(set(OWN) - set(VOCABULARY))))
    placement = draw(placements(name))
    recompute = draw(recomputes(placement.num_stages))
    chunks = draw(st.sampled_from([1, 1, 2, 4]))
    count = chunks * draw(st.integers(1, 12 // chunks))
    return build(name, placement.num_stages, count, placement, recompute, group_size=chunks), recompute


@given(tables(), st.data())
@settings(deadline=None, max_examples=80)
def test_every_table_is_valid_for_any_number_of_its_micro_batches(
    case: tuple[Schedule, Recompute], data: st.DataObject
) -> None:
    table, _ = case
    check_table(table)
    assert Schedule.from_text(table.text()) == table
    rows = data.draw(st.integers(1, table.num_micro_batches // table.group_size))
    check_table(table.first(rows * table.group_size))


@given(tables())
@settings(deadline=None, max_examples=60)
def test_the_micro_batches_of_row_m_are_on_replica_m_modulo_their_number(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    for stage, workers in enumerate(table.placement.workers):
        for index, process in enumerate(workers):
            own = [action for action in table.actions[process] if action.stage == stage]
            ended = {B, WEIGHT}
            for kinds in ({F}, {B, INPUT}, ended) if table.is_training else ({F},):
                ran = sorted(action.micro_batch or 0 for action in own if action.kind in kinds)
                every = range(table.num_micro_batches)
                assert ran == [m for m in every if m // table.group_size % len(workers) == index]
            assert own.count(Action(U, stage)) == table.is_training
            assert own.count(Action(G, stage)) == (table.is_training and len(workers) > 1)


@given(tables())
@settings(deadline=None, max_examples=60)
def test_a_reduction_follows_the_last_backward_at_once(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    for actions in table.actions:
        reduced = [action.stage for action in actions if action.kind == G]
        assert reduced == sorted(reduced, reverse=True)
        for index, action in enumerate(actions):
            own = [(at, other) for at, other in enumerate(actions) if other.stage == action.stage]
            backwards = [at for at, other in own if other.kind.completes_micro_batch]
            if action.kind == G and backwards:
                deeper = [at for at, other in enumerate(actions) if other.kind == G and other.stage > action.stage]
                assert index == 1 + max(backwards + deeper)


@given(tables(), st.fractions(0, 3, max_denominator=4))
@settings(deadline=None, max_examples=60)
def test_the_parts_of_every_step_add_up(case: tuple[Schedule, Recompute], reduce: Fraction) -> None:
    table, _ = case
    costs = Costs(Fraction(1), Fraction(2), Fraction(3, 2), Fraction(1, 3), Fraction(1, 4), reduce)
    timeline = simulate(table, costs)
    result = breakdown(timeline)
    for process, parts in enumerate(result.processes):
        assert (parts.total, parts.other) == (timeline.total_seconds, 0)
        assert parts.wait == idle_seconds(timeline, process)
    assert all(parts.total == timeline.total_seconds for parts in result.stages)
    without = simulate(table, Costs(Fraction(1), Fraction(2), Fraction(3, 2), Fraction(1, 3), Fraction(1, 4)))
    most = sum(count > 1 for count in table.placement.replicas) * reduce
    assert without.total_seconds <= timeline.total_seconds <= without.total_seconds + most
    assert len(draw_text(timeline).splitlines()) == len(table.placement.places) + 1


@given(st.sampled_from(sorted(OWN)), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=50)
def test_uniform_replicas_are_pipelines_side_by_side(
    name: str, of_replica: int, stages_each: int, replicas: int, data: st.DataObject
) -> None:
    num_stages = of_replica * (2 if name in V_SHAPED else stages_each)
    share = data.draw(st.integers(1, 12 // replicas))
    recompute = data.draw(recomputes(num_stages))
    whole = placement_for(name, num_stages, of_replica * replicas, replicas)
    one = placement_for(name, num_stages, of_replica)
    table = build(name, num_stages, replicas * share, whole, recompute)
    alone = build(name, num_stages, share, one, recompute)
    costs = Costs(Fraction(1), Fraction(2), Fraction(1), Fraction(1, 2))
    assert simulate(table, costs).total_seconds == simulate(alone, costs).total_seconds
    assert most_of_equal_stages(table) == most_of_equal_stages(alone)
    for process, actions in enumerate(table.actions):
        replica, place = divmod(process, of_replica)
        mapped = [
            str(Action(a.kind, a.stage, None if a.micro_batch is None else a.micro_batch * replicas + replica))
            for a in alone.actions[place]
        ]
        assert [str(action) for action in actions if action.kind != G] == mapped


@given(st.sampled_from(UNEVEN), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_1f1b_keeps_as_many_in_flight_as_pipedream(counts: list[int], num_micro_batches: int) -> None:
    table = build("1f1b", len(counts), num_micro_batches, recompute="none", replicas=counts)
    for stage, count in enumerate(counts):
        most = math.ceil(sum(counts[stage:]) / count)
        for index, process in enumerate(table.placement.workers[stage]):
            own = len(range(index, num_micro_batches, count))
            kinds = [action.kind for action in table.actions[process]]
            warm_up = kinds.index(B) if B in kinds else 0
            assert warm_up == min(most, own)
        assert most_of_equal_stages(table)[stage][Held.MICRO_BATCH] <= most


@given(tables())
@settings(deadline=None, max_examples=60)
def test_a_limit_of_graphs_holds_on_each_worker(case: tuple[Schedule, Recompute]) -> None:
    table, recompute = case
    if isinstance(recompute, tuple) and table.is_training:
        most = most_of_equal_stages(table)
        assert all(limit is None or most[stage][Held.GRAPH] <= limit for stage, limit in enumerate(recompute))


def test_text_of_replicas() -> None:
    table = build("1f1b", 2, 4, replicas=[2, 1])
    assert table.text() == ONE_TWO
    assert Schedule.from_text(ONE_TWO) == table
    devices = Schedule.from_text(ONE_TWO.replace("0,1 2\n", "0,1 2\ndevices: cuda:0 cuda:1 cuda:0\n"))
    assert devices.placement.device_of(0, 1) == "cuda:1"
    assert Schedule.from_text(devices.text()) == devices


def test_a_text_of_version_1_means_the_same() -> None:
    table = build("gpipe", 2, 3)
    assert Schedule.from_text(table.text().replace("table: 10", "table: 1")) == table


def test_a_replica_without_a_micro_batch_still_reduces() -> None:
    table = build("gpipe", 2, 1, replicas=2)
    assert [" ".join(map(str, actions)) for actions in table.actions[2:]] == ["0G 0U", "1G 1U"]
    assert simulate(table, Costs(1, 2)).total_seconds == simulate(build("gpipe", 2, 1), Costs(1, 2)).total_seconds


def test_between_which_workers_micro_batches_pass() -> None:
    assert Placement.one_stage_each(3, [2, 1, 2]).edges == ((0, 0, 2), (0, 1, 2), (1, 2, 3), (1, 2, 4))
    assert Placement.one_stage_each(2, 2).edges == ((0, 0, 1), (0, 2, 3))
    assert Placement.one_stage_each(2, [2, 3]).edges == tuple((0, p, q) for p in (0, 1) for q in (2, 3, 4))
    assert Placement.spread(2, 1).edges == ((0, 0, 0),)


@given(tables())
@settings(deadline=None, max_examples=60)
def test_every_message_has_an_edge(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    placement = table.placement
    crossed = set()
    for stage in range(table.num_stages - 1):
        for micro_batch in range(table.num_micro_batches):
            ends = (table.worker_of(Action(F, s, micro_batch)) for s in (stage, stage + 1))
            crossed.add((stage, *ends))
    assert crossed <= set(placement.edges)
    if table.num_micro_batches // table.group_size >= math.lcm(*placement.replicas):
        assert crossed == set(placement.edges)


def test_who_needs_which_micro_batches_and_who_reduces_together() -> None:
    table = build("1f1b", 3, 5, replicas=[2, 1, 2])
    stages = (0, 0, 1, 2, 2)
    assert [table.micro_batches_of(process, stage) for process, stage in enumerate(stages)] == [
        (0, 2, 4),
        (1, 3),
        (0, 1, 2, 3, 4),
        (0, 2, 4),
        (1, 3),
    ]
    assert table.placement.groups == ((0, 1), (3, 4))
    assert placement_for("gpipe", 4, 4, 2).groups == ((0, 2), (1, 3))
    assert Placement.one_stage_each(3).groups == ()
    assert build("gpipe", 2, 1, replicas=2).micro_batches_of(2, 0) == ()


def test_where_replicas_are() -> None:
    assert placement_for("1f1b", 2, 4, 2).workers == ((0, 2), (1, 3))
    assert placement_for("gpipe", 4, 4, 2).workers == ((0, 2), (0, 2), (1, 3), (1, 3))
    assert placement_for("interleaved_1f1b", 4, 4, 2).workers == ((0, 2), (1, 3), (0, 2), (1, 3))
    assert placement_for("1f1b", 3, 6, [3, 1, 2]).workers == ((0, 1, 2), (3,), (4, 5))
    assert placement_for("1f1b", 2, 4, [2, 2]) == Placement.one_stage_each(2, 2)
    place = placement_for("1f1b", 3, 5, [2, 2, 1])
    assert place.replicas == (2, 2, 1)
    assert place.places == ((0, 0), (0, 1), (1, 2), (1, 3), (2, 4))
    assert place.stages_of(3) == (1,)
    assert [place.worker_of(*where) for where in ((0, 2), (1, 3), (2, 3), (2, None))] == [0, 3, 4, 4]
    with pytest.raises(ScheduleError, match=r"a whole step of stage 0 stands on each of the processes \[0, 1\]"):
        place.worker_of(0, None)


def test_a_copy_of_a_placement_keeps_its_devices() -> None:
    copy = Placement([0, (1, 2)], ["a", "b", "c"]).replicated(2)
    assert copy.workers == ((0, 3), (1, 2, 4, 5))
    assert [copy.device_of(*place) for place in copy.places] == ["a", "a", "b", "c", "b", "c"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement([(0, 0)]), "replicas of stage 0 .* none twice"),
        (lambda: Placement([()]), "name at least one"),
        (lambda: Placement([(0, 2)]), "without a gap"),
        (lambda: Placement([(0, 1), 2], ["cpu", "cpu"]), "2 devices for 2 stages with 3 replicas"),
        (lambda: Placement.one_stage_each(2).replicated(0), "0 replicas"),
        (lambda: placement_for("gpipe", 2, 3, 2), "replicas is 2 and the number of processes is 3: .* multiple"),
        (lambda: placement_for("gpipe", 2, 2, [2, 1]), r"replicas \[2, 1\] are on 3 processes, and there are 2"),
        (lambda: placement_for("gpipe", 2, 3, [2, 1, 1]), r"replicas \[2, 1, 1\] has 3 entries for 2 stages"),
        (lambda: placement_for("gpipe", 2, 2, 0), "replicas is 0: every stage has at least one"),
        (lambda: build("gpipe", 2, 2, Placement.one_stage_each(2), replicas=2), r"replicas is 2, but .* have \[1, 1\]"),
        (
            lambda: build("interleaved_1f1b", 4, 4, Placement([(0, 1), (0, 1), 0, 0])),
            "as many replicas of every stage; the placement is 0,1 0,1 0 0. Use",
        ),
    ],
)
def test_wrong_replicas(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=message):
        make()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0R2 0B2 0G 0U", "0R2 0B2 0U", "0G is missing from process 0; every replica of a stage reduces"),
        ("0R2 0B2 0G 0U", "0G 0R2 0B2 0U", "0G comes before 0B2, which it needs, on process 0"),
        ("0R2 0B2 0G 0U", "0R2 0B2 0U 0G", "0U comes before 0G, which it needs, on process 0"),
        ("0R2 0B2 0G 0U", "0R2 0B2 0G 0G 0U", "0G occurs twice on process 0"),
        ("1B3 1U", "1B3 1G 1U", "1G on process 2: stage 1 has no other replica"),
        ("0R3 0B3 0G 0U", "0R3 0B3 0G", "0U is missing from process 1"),
        ("0F0 0F2", "0F0 0F1", "0F1 is on process 0, but micro-batch 1 belongs to replica 1 % 2 of stage 0, on 1"),
        ("1F0 1B0", "0F0 1B0", "0F0 is on process 2, but stage 0 is placed on 0 and 1"),
        ("1F0 1B0 1F1 1B1 1F2", "1F2 1B0 1F1 1B1 1F0", "1B0 comes before 1F0"),
        ("1F0 1B0 1F1 1B1 1F2 1B2", "1F2 1B2 1F1 1B1 1F0 1B0", "1F2 takes the message of 0F0: stage 1 must receive"),
    ],
)
def test_wrong_tables_with_replicas(old: str, new: str, message: str) -> None:
    assert old in ONE_TWO
    with pytest.raises(ScheduleError, match=message):
        check_table(Schedule.from_text(ONE_TWO.replace(old, new)))


def test_only_the_messages_between_two_workers_keep_an_order() -> None:
    """The last stage takes the micro-batches of two workers in any order: each pair of workers has its own edge."""
    swapped = ONE_TWO.replace("1F0 1B0 1F1 1B1", "1F1 1B1 1F0 1B0")
    check_table(Schedule.from_text(swapped))


def test_reductions_stand_in_one_order_on_all_workers() -> None:
    crossed = (
        "table: 10\nschedule: crossed\nnum_stages: 2\nnum_micro_batches: 2\nplacement: 0,1 0,1\n"
        "process 0: 0F0 1F0 1B0 0B0 1G 0G 0U 1U\nprocess 1: 0F1 1F1 1B1 0B1 0G 1G 0U 1U\n"
    )
    with pytest.raises(ScheduleError, match="reductions wait for each other: process 0 at 1G; process 1 at 0G"):
        check_table(Schedule.from_text(crossed))
    check_table(Schedule.from_text(crossed.replace("0G 1G", "1G 0G")))


def test_a_reduction_overlaps_with_the_other_stages_and_delays_its_update() -> None:
    table = build("gpipe", 2, 2, placement_for("gpipe", 2, 2, 2), "none")
    timeline = simulate(table, Costs(1, 2, update_seconds=1, reduce_seconds=[3, 4]))
    spans = {(span.process, str(span.action)): (span.start, span.end) for span in timeline.spans}
    # 0F 1F 1B 0B end at 1, 2, 4 and 6: stage 1 reduces from 4 to 8, and stage 0 after it.
    assert [spans[p, "1G"] for p in (0, 1)] == [(4, 8), (4, 8)]
    assert [spans[p, "0G"] for p in (0, 1)] == [(8, 11), (8, 11)]
    assert [spans[0, text] for text in ("0B0", "0U", "1U")] == [(4, 6), (11, 12), (12, 13)]
    assert timeline.bubble == pytest.approx(5 / 13)
    assert breakdown(timeline).mean.wait == 5


def test_a_reduction_begins_when_the_last_replica_has_come() -> None:
    timeline = simulate(build("gpipe", 1, 3, recompute="none", replicas=2), Costs(1, 2, reduce_seconds=2))
    reductions = [(span.process, span.start, span.end) for span in timeline.spans if span.action.kind == G]
    assert reductions == [(0, 6, 8), (1, 6, 8)]
    assert timeline.total_seconds == 8


def test_two_replicas_and_one() -> None:
    timeline = simulate(build("1f1b", 2, 4, recompute="none", replicas=[2, 1]), Costs([2, 1], [4, 2], reduce_seconds=2))
    assert draw_text(timeline).splitlines() == [
        "stage 0 (process 0)  F0 -- F2 -- .. B0 -- -- -- .. .. B2 -- -- -- .. .. .. G  --",
        "stage 0 (process 1)  F1 -- F3 -- .. .. .. .. B1 -- -- -- .. .. B3 -- -- -- G  --",
        "stage 1 (process 2)  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. .. .. ..",
        "total 20 s, bubble 40.0%",
    ]


def test_three_one_and_two() -> None:
    timeline = simulate(
        build("1f1b", 3, 6, recompute="none", replicas=[3, 1, 2]), Costs([3, 1, 2], [6, 2, 4], reduce_seconds=3)
    )
    assert draw_text(timeline).splitlines() == [
        "stage 0 (process 0)  FFFFFF......BBBBBB...BBBBBB......GGG",
        "stage 0 (process 1)  FFFFFF.........BBBBBB...BBBBBB...GGG",
        "stage 0 (process 2)  FFFFFF............BBBBBB...BBBBBBGGG",
        "stage 1 (process 3)  ...FFF....BBFBBFBBFBB.BB.BB.........",
        "stage 2 (process 4)  ....FFBBBBFFBBBBFFBBBB...GGG........",
        "stage 2 (process 5)  .....FFBBBB..FFBBBBFFBBBBGGG........",
        "total 36 s, bubble 50.0%",
    ]
