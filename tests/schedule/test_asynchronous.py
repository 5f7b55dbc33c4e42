"""PipeDream's tables: several steps without a flush, and which version of the weights each action reads."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.asynchronous import table as pipedream
from hf_gpipe.schedule import (
    Action,
    Costs,
    Placement,
    Schedule,
    build,
    check_table,
    draw_text,
    num_stashes,
    read_table,
    simulate,
    staleness,
    window_schedules,
)
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE, REDUCE, UPDATE, Held
from hf_gpipe.schedule.versions import uses
from tests.schedule.cases import peak, placements, recomputes, stage_order
from tests.schedule.test_messages import operations, runs_with_blocking_messages

B, U = BACKWARD, UPDATE


def window(name: str, num_stages: int, steps: list[int], **options: object) -> Schedule:
    return build(name, num_stages, sum(steps), steps=steps, **{"recompute": "none", **options})  # type: ignore[arg-type]


@st.composite
def replicated(draw: st.DrawFn) -> Placement:
    """A process for each replica of each stage."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return Placement.one_stage_each(len(counts), counts)


@st.composite
def windows(draw: st.DrawFn, places: st.SearchStrategy[Placement] | None = None) -> Schedule:
    name = draw(st.sampled_from(sorted(window_schedules())))
    placement = draw(placements() if places is None else places)
    steps = [*draw(st.lists(st.integers(max(placement.replicas), 5), max_size=6)), draw(st.integers(1, 5))]
    recompute = draw(recomputes(placement.num_stages))
    return window(name, placement.num_stages, steps, placement=placement, recompute=recompute)


@given(windows() | windows(replicated()))
@settings(deadline=None, max_examples=60)
def test_every_window_is_valid_and_keeps_what_is_still_to_be_read(table: Schedule) -> None:
    check_table(table)
    assert Schedule.from_text(table.text()) == table
    assert runs_with_blocking_messages(table, operations(table))
    assert table.steps is not None
    for process, actions in enumerate(table.actions):
        versions = [{0} for _ in range(table.num_stages)]
        updates = [0] * table.num_stages
        for action, use in zip(actions, uses(table, process), strict=True):
            stage = action.stage
            if use is None:
                assert action.kind == REDUCE
                continue
            if action.kind == U:
                assert use.version == action.step == updates[stage]
                updates[stage] += 1
                versions[stage] = versions[stage] - ({use.version} if use.is_last else set()) | {updates[stage]}
                continue
            assert use.version in versions[stage], f"{action} reads what is gone"
            if table.stashes or action.kind == FORWARD:
                assert use.version == table.version_read[stage, action.micro_batch or 0]
            else:
                assert use.version == updates[stage], f"{action} reads a stash"
            if action.kind == B:
                assert updates[stage] == table.step_of[action.micro_batch or 0]
            if use.is_last and use.version < updates[stage]:
                versions[stage].remove(use.version)
        assert updates == [len(table.steps) * (s in table.placement.stages_of(process)) for s in range(len(updates))]
        assert all(left in ({0}, {len(table.steps)}) for left in versions), "a stash is left"
    for m in range(table.num_micro_batches):
        read = [table.version_read[stage, m] for stage in range(table.num_stages)]
        if table.name in ("pipedream_vertical", "pipedream_2bw"):
            assert len(set(read)) == 1, "one version on all stages"
        elif not table.placement.has_replicas:
            assert read == sorted(read)


@given(windows())
@settings(deadline=None, max_examples=50)
def test_versions_do_not_depend_on_the_placement(table: Schedule) -> None:
    alone = window(table.name, table.num_stages, list(table.steps or ()))
    assert alone.version_read == table.version_read
    for stage in range(table.num_stages):
        assert num_stashes(alone, stage) == num_stashes(table, stage)
        own = [action for action in stage_order(table, stage) if action.kind != RECOMPUTE]
        assert own == [action for action in stage_order(alone, stage) if action.kind != RECOMPUTE]


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_the_papers_delays(num_stages: int, num_steps: int, size: int) -> None:
    """Stage s of stashing is K-s-1 micro-batches late and keeps as many old versions; 2BW is one update late."""
    steps = [size] * num_steps
    stashing, vertical, double, naive = (window(name, num_stages, steps) for name in window_schedules())
    assert replace(naive, name="pipedream", stashes=True) == stashing
    for stage in range(num_stages):
        late = num_stages - stage - 1
        for m in range(size * num_steps):
            assert stashing.version_read[stage, m] == max((m - late) // size, 0)
            assert vertical.version_read[stage, m] == max((m - num_stages + 1) // size, 0)
            assert double.version_read[stage, m] == max(m // size - 1, 0)
        if size == 1:
            assert staleness(stashing, stage) == [min(m, late) for m in range(num_steps)]
            # In the steady state; the first micro-batches of a window all read version 0.
            assert num_stashes(stashing, stage) == min(late, max(num_steps - late, 1), num_steps - 1)
            assert num_stashes(vertical, stage) <= num_stages - 1
        assert num_stashes(double, stage) <= 1
        assert num_stashes(naive, stage) == 0
        assert peak(stashing, stage, Held.MICRO_BATCH) == min(late + 1, size * num_steps)
    assert set(staleness(build("1f1b", num_stages, size), 0)) == {0}


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(2, 6), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_the_papers_delays_with_replicas(replicas: list[int], num_steps: int, rounds: int) -> None:
    """With whole rounds in a step: on each of r replicas ceil(n / r) micro-batches are in flight (section 3.2)."""
    size = math.lcm(*replicas) * rounds
    stashing, vertical, double, _ = (
        window(name, len(replicas), [size] * num_steps, replicas=replicas) for name in window_schedules()
    )
    for stage, count in enumerate(replicas):
        in_flight = math.ceil(sum(replicas[stage:]) / count)
        for m in range(size * num_steps):
            newest = max((m - (in_flight - 1) * count) // size, 0)
            assert stashing.version_read[stage, m] == newest
            assert vertical.version_read[stage, m] == vertical.version_read[0, m] == stashing.version_read[0, m]
            assert double.version_read[stage, m] == max(m // size - 1, 0)
        own = len(stashing.placement.micro_batches_of(stage, stashing.placement.workers[stage][0], size * num_steps))
        assert peak(stashing, stage, Held.MICRO_BATCH) == min(in_flight, own)


def test_replicas_wait_for_each_other_before_an_update() -> None:
    """Two replicas, a step with a micro-batch each: the reduction begins when both have reached it."""
    table = window("pipedream", 1, [2, 2], replicas=[2])
    assert [list(map(str, actions)) for actions in table.actions] == [
        ["0F0", "0B0", "0G", "0U", "0F2", "0B2", "0G1", "0U1"],
        ["0F1", "0B1", "0G", "0U", "0F3", "0B3", "0G1", "0U1"],
    ]
    costs = Costs(forward_seconds=1, backward_seconds=2, update_seconds=1, reduce_seconds=3)
    assert simulate(table, costs).total_seconds == 2 * (1 + 2 + 3 + 1)
    # Two stages, of which the first has two replicas: its reduction goes on beside the second stage's work.
    table = window("pipedream", 2, [2, 2], replicas=[2, 1])
    spans = {(span.process, str(span.action)): span for span in simulate(table, costs).spans}
    assert spans[0, "0G"].start == spans[1, "0G"].start == max(spans[0, "0B0"].end, spans[1, "0B1"].end)
    assert spans[0, "0U"].start == spans[0, "0G"].end
    assert spans[0, "0U"].end <= spans[0, "0B2"].start


@given(st.integers(1, 8), st.integers(1, 12), st.sampled_from(["pipedream", "pipedream_vertical"]))
@settings(deadline=None, max_examples=25)
def test_a_window_fills_and_drains_once(num_stages: int, num_steps: int, name: str) -> None:
    timeline = simulate(window(name, num_stages, [1] * num_steps), Costs(Fraction(1), Fraction(2)))
    assert timeline.total_seconds == 3 * (num_steps + num_stages - 1)
    # With M >= K - 1 no forward of 2BW waits for an update either.
    double = window("pipedream_2bw", num_stages, [max(num_stages - 1, 1)] * num_steps)
    expected = 3 * (double.num_micro_batches + num_stages - 1)
    assert simulate(double, Costs(Fraction(1), Fraction(2))).total_seconds == expected


def test_updates_take_their_time_where_they_stand() -> None:
    costs = Costs(forward_seconds=1, backward_seconds=2, update_seconds=1)
    assert simulate(window("pipedream", 1, [1] * 5), costs).total_seconds == 20
    # The last stage, which is busy all the time, and the way there and back.
    assert simulate(window("pipedream", 3, [1] * 5), costs).total_seconds == 2 + 5 * 4 + 4


def test_the_docstring_draws_the_real_tables() -> None:
    doc = [line.strip() for line in (pipedream.__doc__ or "").splitlines() if line.strip().startswith("stage ")]
    costs = Costs(forward_seconds=1, backward_seconds=2)
    tables = [window("pipedream", 3, [1] * 5), window("pipedream_2bw", 3, [3, 3])]
    drawn = [line for table in tables for line in draw_text(simulate(table, costs)).splitlines()[:-1]]
    assert doc == drawn


def test_the_page_draws_the_real_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipedream.md").read_text(encoding="utf-8")
    tables = [window("pipedream", 4, [1] * 8), window("pipedream_2bw", 3, [4, 4])]
    equal, figure_8 = Costs(forward_seconds=1, backward_seconds=2), Costs([2, 1], [4, 2])
    replicated = window("pipedream", 2, [2] * 4, replicas=[2, 1])
    for table, costs in ((tables[0], equal), (tables[1], equal), (replicated, figure_8)):
        drawn = draw_text(simulate(table, costs), width=200)
        assert drawn.strip() in page
    for name, table, m in (
        ("pipedream", tables[0], 5),
        ("pipedream_vertical", window("pipedream_vertical", 4, [1] * 8), 5),
        ("pipedream_2bw", window("pipedream_2bw", 4, [4] * 8), 20),
    ):
        read = " | ".join(f"{table.version_read[stage, m]} of 5" for stage in range(4))
        assert re.search(rf"\| `{name}`[^|]* \| {re.escape(read)} \|", page)


GOOD = """
table: 10
schedule: mine
num_stages: 2
num_micro_batches: 3
placement: 0 1
steps: 1 1 1
process 0: 0F0 0F1 0B0 0U 0F2 0B1 0U1 0B2 0U2
process 1: 1F0 1B0 1U 1F1@0 1B1 1U1 1F2@1 1B2 1U2
"""


def test_a_window_s_text() -> None:
    assert Schedule.from_text(GOOD) == replace(window("pipedream_vertical", 2, [1, 1, 1]), name="mine")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0U1 ", "", "0U1 is missing from process 0"),
        ("0B2 0U2", "0B2 0U2 0U3", "0U3 on process 0: the steps are 0 to 2"),
        ("0B1 0U1 0B2 0U2", "0B1 0B2 0U1 0U2", "0B2 comes before 0U1, which it needs"),
        ("0U1 0B2 0U2", "0B2 0U2 0U1", "comes before 0U1, which it needs"),
        ("1F1@0", "1F1@2", "1F1@2: before it stage 1 has 1 updates, so its versions are 0 to 1"),
        ("1B1", "1B1@0", "a forward alone names the version"),
        ("steps: 1 1 1", "steps: 1 1", "the steps have .1, 1. micro-batches and the table 3"),
        ("steps: 1 1 1", "steps: all", "expected the number of micro-batches of each step"),
        ("steps: 1 1 1", "steps: 1 1 1\nstashes: yes", "stashes: found 'yes', expected no, or no such line"),
        ("steps: 1 1 1", "steps: 1 1 1\nstashes: no", "it keeps no stashes .stashes: no., and names versions"),
        ("placement: 0 1", "placement: 0 1,2", "the placement is on 3 processes and the table has the actions of 2"),
        ("steps: 1 1 1\n", "", "0U1 on process 0: the steps are 0 to 0"),
    ],
)
def test_what_a_window_must_not_have(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ScheduleError, match=message):
        check_table(Schedule.from_text(GOOD.replace(old, new)))


def test_what_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"'1f1b' has one step in a table; leave steps out"):
        build("1f1b", 2, 4, steps=[2, 2])
    with pytest.raises(ScheduleError, match="has several steps"):
        window("pipedream", 2, [1, 1]).first(1)
    (tmp_path / "mine.txt").write_text(GOOD.strip())
    with pytest.raises(ScheduleError, match=r"line 6: the table has several steps, and a table that is read has one"):
        read_table(str(tmp_path / "mine.txt"), 2, 3, 2)
    with pytest.raises(ScheduleError, match="give each replica of each stage a process of its own"):
        window("pipedream", 2, [2, 2], placement=Placement([[0, 1], [0, 1]]))
    with pytest.raises(ScheduleError, match="a step has 1 micro-batches and a stage 2 replicas"):
        window("pipedream", 1, [2, 1, 2], replicas=[2])
    text = window("pipedream", 1, [2, 2], replicas=[2]).text().replace("0B3 0G1", "0B3")
    with pytest.raises(ScheduleError, match="0G1 is missing from process 1"):
        check_table(Schedule.from_text(text))
    with pytest.raises(ScheduleError, match=r"it keeps no stashes \(stashes: no\), and has one step"):
        check_table(replace(build("1f1b", 2, 2), stashes=False))
    assert str(Action(U, 2, step=5)) == "2U5"
