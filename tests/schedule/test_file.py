"""Tables that someone wrote: what is read, what is an error, and that any part of a valid table is valid."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import (
    Action,
    Placement,
    Schedule,
    build,
    check_table,
    read_table,
    recompute_under,
)
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE, UPDATE
from tests.schedule.cases import Recompute, placements, schedules

F, R, B, U = FORWARD, RECOMPUTE, BACKWARD, UPDATE

MINE = """\
table: 10
schedule: mine
num_stages: 2
num_micro_batches: 2
placement: 0 1
process 0: 0F1 0F0 0R1 0B1 0B0 0U
process 1: 1F1 1B1 1F0 1B0 1U
"""


@st.composite
def any_valid_tables(draw: st.DrawFn) -> Schedule:
    """Tables that no builder writes: each process takes, again and again, any action that can run."""
    placement, num_micro_batches = draw(placements()), draw(st.integers(1, 4))
    choose = draw(st.randoms(use_true_random=False))
    num_stages = placement.num_stages
    micro_batches = range(num_micro_batches)
    todo = {Action(kind, stage, m) for kind in (F, B) for stage in range(num_stages) for m in micro_batches}
    # Every stage takes the forwards in one order and the backwards in another, as messages come.
    forwards, backwards = (
        {m: place for place, m in enumerate(choose.sample(micro_batches, num_micro_batches))} for _ in (F, B)
    )
    recomputed = {Action(R, a.stage, a.micro_batch) for a in todo if a.kind == F and choose.random() < 0.5}
    todo |= recomputed
    done: set[Action] = set()
    processes: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    while todo - done:
        can_run = sorted(a for a in todo - done if _can_run(a, num_stages, todo, done, forwards, backwards))
        action = choose.choice(can_run)
        processes[placement.worker_of(action.stage, action.micro_batch)].append(action)
        done.add(action)
    for process, actions in enumerate(processes):
        actions += [Action(U, stage) for stage in placement.stages_of(process)]
    return Schedule("any", num_stages, num_micro_batches, placement, tuple(map(tuple, processes)))


def _can_run(
    action: Action,
    num_stages: int,
    todo: set[Action],
    done: set[Action],
    forwards: dict[int, int],
    backwards: dict[int, int],
) -> bool:
    stage, m = action.stage, action.micro_batch
    assert m is not None
    needed = [source] if (source := action.source(num_stages)) else []
    if action.kind != F:
        needed.append(Action(F, stage, m))
    if action.kind == B and Action(R, stage, m) in todo:
        needed.append(Action(R, stage, m))
    if action.kind != R:
        places = forwards if action.kind == F else backwards
        needed += [Action(action.kind, stage, other) for other, place in places.items() if place < places[m]]
    return done.issuperset(needed)


@given(any_valid_tables(), st.data())
@settings(deadline=None, max_examples=80)
def test_the_first_micro_batches_of_any_valid_table_are_a_valid_table(table: Schedule, data: st.DataObject) -> None:
    check_table(table)
    part = table.first(data.draw(st.integers(1, table.num_micro_batches)))
    check_table(part)
    assert Schedule.from_text(part.text()) == part
    for whole, kept in zip(table.actions, part.actions, strict=True):
        assert list(kept) == [a for a in whole if (a.micro_batch or 0) < part.num_micro_batches]


@given(schedules(), st.data())
@settings(deadline=None, max_examples=80)
def test_so_are_those_of_the_builders(case: tuple[Schedule, Recompute], data: st.DataObject) -> None:
    table, _ = case
    rows = data.draw(st.integers(1, table.num_micro_batches // table.group_size))
    check_table(table.first(rows * table.group_size))


def test_a_table_has_no_more_micro_batches_than_it_has() -> None:
    table = build("1f1b", 2, 3)
    assert table.first(3) is table
    for number in (0, 4):
        with pytest.raises(ScheduleError, match=f"a step has {number} micro-batches and the table '1f1b' 3"):
            table.first(number)


def test_the_tables_of_the_documentation_are_valid() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("table: 10")
    text = "\n".join(lines[start : start + 7])
    assert Schedule.from_text(text) == build("1f1b", 2, 3, recompute="none")
    (edited,) = (line for line in lines[start + 7 :] if line.startswith("process 0:"))
    check_table(Schedule.from_text(text.replace("process 0: 0F0 0F1 0B0 0F2 0B1 0B2 0U", edited)))


def written(folder: Path, text: str) -> str:
    path = folder / "mine.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_table_is_read_from_its_file(tmp_path: Path) -> None:
    for text in (MINE, f"\ufeff{MINE}", MINE.replace("\n", "\r\n\r\n"), MINE.replace("0F1 0F0", "0F1   0F0")):
        table = read_table(written(tmp_path, text), 2, 2, 2)
        assert table.text() == MINE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("table: 10\n", "", "line 1: found 'schedule: mine', expected .* table:"),
        ("table: 10", "table: 11", "line 1: .* of version '11', .* reads versions 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10"),
        ("1F1", "1Q1", "line 7: '1Q1': Q is not a kind of action in version 10"),
        ("1F1", "1 F1", "line 7: '1' is not an action"),
        ("1U", "1U5", "line 7: .*1U5 on process 1: the steps are 0 to 0"),
        (" 1B0", "", "line 7: .*1B0 is missing from process 1; it must occur exactly once"),
        ("1F1 1B1", "1F1 1F1 1B1", "line 7: .*1F1 occurs twice on process 1; keep one"),
        (" 0U", "", "line 6: .*0U is missing from process 0"),
        ("1U", "1U 1R0", "line 7: .*1B0 comes before 1R0, which it needs"),
        ("0F1 0F0", "0F0 0F1", "line 7: .*1F1 takes the message of 0F0: stage 1 must receive in the order"),
        ("1F1 1B1", "1F1 0F0 1B1", "line 7: .*0F0 is on process 1, but stage 0 is placed on 0; move it"),
        ("1F1 1B1", "1F1 2F0 1B1", "line 7: .*2F0 on process 1: the stages are 0 to 1"),
        ("1F1 1B1", "1F1 1F2 1B1", "line 7: .*1F2 on process 1: the micro-batches are 0 to 1"),
        ("1F1 1B1 1F0 1B0 1U", "", "line 7: .*1F0 is missing from process 1"),
        ("process 1: 1F1 1B1 1F0 1B0 1U\n", "", "line 5: .*on 2 processes and the table has the actions of 1"),
        ("1U\n", "1U\nprocess 2: 1U\n", "line 8: .*on 2 processes and the table has the actions of 3"),
        ("process 1", "process 3", "line 7: found 'process 3.*expected .* process 1:"),
        ("placement: 0 1", "placement: 0,x 1", "line 5: placement: found '0,x 1'.*one process for each stage"),
        (
            "placement: 0 1",
            "placement: 0,1 1",
            "line 6: .*0F1 is on process 0, but micro-batch 1 belongs to replica 1 % 2",
        ),
        ("placement: 0 1", "placement: 0 1 1", "line 5: .*placement is of 3 stages and the table of 2"),
        ("num_stages: 2", "num_stages: 3", "line 5: .*placement is of 2 stages and the table of 3"),
        ("num_micro_batches: 2", "num_micro_batches: 999999999", "line 6: .*0F2 is missing"),
        ("placement: 0 1", "placement: 0 1\ndevices: cpu cpu", "line 6: the devices .* pipeline.devices; leave"),
    ],
)
def test_a_wrong_table_is_an_error_of_its_file_and_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, MINE.replace(old, new))
    with pytest.raises(ScheduleError, match=f"^{re.escape(path)}, {message}"):
        read_table(path, 2, 2, 2)


def test_a_deadlock_is_an_error_of_the_line_that_stops_first(tmp_path: Path) -> None:
    text = build("gpipe", 2, 1, Placement.spread(2, 1), "none").text().replace("0F0 1F0", "1F0 0F0")
    with pytest.raises(ScheduleError, match=r"mine.txt, line 6: .*deadlock: process 0 stops at 1F0, waiting for 0F0;"):
        read_table(written(tmp_path, text), 2, 1, 1)


def test_a_table_of_forwards_does_not_train(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"mine.txt, line 6: the table has forwards only"):
        read_table(written(tmp_path, build("forward_only", 2, 2).text()), 2, 2, 2)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 2, 2), "line 3: the table has 2 stages, and num_stages is 3; change one"),
        ((2, 4, 2), "line 4: the table has 2 micro-batches, and num_micro_batches, .* is 4; change one"),
        ((2, "auto", 2), "line 4: the table has 2 micro-batches, and num_micro_batches, .* is auto; change one"),
        ((2, 2, 1), "line 5: the table is for 2 processes, and there are 1; set num_processes to 2"),
    ],
)
def test_numbers_that_contradict_the_table(numbers: tuple[int, int | str, int], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, MINE)
    with pytest.raises(ScheduleError, match=f"^{re.escape(path)}, {message}"):
        read_table(path, *numbers)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"there is no file nowhere.txt \(looked in .*--table"):
        read_table("nowhere.txt", 2, 2, 2)
    (tmp_path / "odd.txt").write_bytes(b"table: \xff")
    with pytest.raises(ScheduleError, match="is not UTF-8 text"):
        read_table(str(tmp_path / "odd.txt"), 2, 2, 2)
    with pytest.raises(ScheduleError, match="cannot be read"):
        read_table(str(tmp_path), 2, 2, 2)
    with pytest.raises(ScheduleError, match="the line 'table:' is missing"):
        read_table(written(tmp_path, ""), 2, 2, 2)


def test_recomputation_is_what_the_table_says(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, MINE), 2, 2, 2)
    assert recompute_under(table, "stage") == recompute_under(table, [2, "none"]) == (2, "none")
    plain, whole = build("gpipe", 2, 2, recompute="none"), build("gpipe", 2, 2, recompute="stage")
    assert [recompute_under(plain, mode) for mode in ("stage", "none", "block")] == ["none", "none", "block"]
    assert recompute_under(whole, "stage") == "stage"
    for one, mode in ((table, "none"), (table, "block"), (table, "auto"), (whole, "block"), (plain, [1, 1])):
        with pytest.raises(ScheduleError, match=r"^recompute is .*; leave recompute out"):
            recompute_under(one, mode)


@given(st.text(max_size=40) | st.randoms().map(lambda chance: scrambled(chance)))
@settings(deadline=None, max_examples=100)
def test_any_text_is_a_table_or_an_error_that_says_where(text: str) -> None:
    try:
        table = Schedule.from_text(text)
    except ScheduleError as error:
        words = str(error)
    else:
        assert Schedule.from_text(table.text()) == table
        return
    assert re.match(r"line \d+: |the line '\w+:' is missing", words), words


def scrambled(chance: random.Random) -> str:
    """A table's text with one character changed, left out or added."""
    at, signs = chance.randrange(len(MINE)), "0159FRBUX: \n,"
    return MINE[:at] + chance.choice([*signs, ""]) + MINE[at + chance.randrange(2) :]


# ---------------------------------------------------------------------- sizes that nobody means


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_stages: 2", "num_stages: 2000000000", "num_stages: found '2000000000', expected one number"),
        ("num_stages: 2", "num_stages: 999999999", "the placement is of 2 stages and the table of 999999999"),
        ("num_micro_batches: 2", "num_micro_batches: 999999999", "0F2 is missing"),
        ("placement: 0 1", "placement: 0 999999999", "numbered from 0 to 1"),
        ("placement: 0 1", "placement: " + "0," * 100_000 + "0 1", "name at least one"),
        ("0F1 0F0", "0F1 999999999F0", "the stages are 0 to 1"),
        ("0F1 0F0", "0F1 0F999999999", "the micro-batches are 0 to 1"),
        ("0F1 0F0", "0F1 " * 600_001, "more than 600000 actions"),
        ("schedule: mine", "schedule: " + "x" * (1 << 24), "over 16 MiB"),
    ],
)
def test_a_size_that_nobody_means_is_told_in_seconds(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text(MINE.replace(old, new, 1))
    start = time.monotonic()
    with pytest.raises(ScheduleError, match=re.escape(message)):
        read_table(str(tmp_path / "table.txt"), 2, 2, 2)
    assert time.monotonic() - start < 10


def test_a_file_without_an_end_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "table.txt").symlink_to("/dev/zero")
    with pytest.raises(ScheduleError, match="over 16 MiB"):
        read_table(str(tmp_path / "table.txt"), 2, 2, 2)


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "replicas"),
    [(2_000_000_000, 1, 1), (1, 2_000_000_000, 1), (10_000, 10_000, 1), (2, 2, 2_000_000_000), (10**6, 1, 10**6)],
)
def test_a_table_that_would_be_too_large_is_not_made(num_stages: int, num_micro_batches: int, replicas: int) -> None:
    start = time.monotonic()
    with pytest.raises(ScheduleError, match=r"num_stages is \d+"):
        build("gpipe", num_stages, num_micro_batches, replicas=replicas)
    assert time.monotonic() - start < 5
