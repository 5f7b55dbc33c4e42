"""Tables in torch's CSV: torch's own check accepts those that are written, and reading them gives the same order."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from hf_gpipe.commands.simulate import main
from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Costs, build, placement_for, simulate
from hf_gpipe.schedule.torch_csv import read_torch, write_torch


@pytest.mark.parametrize(
    ("name", "stages", "processes"), [("gpipe", 3, 3), ("1f1b", 4, 4), ("zb_h1", 4, 4), ("zb_v", 4, 2)]
)
def test_torch_accepts_a_table_and_it_comes_back(name: str, stages: int, processes: int) -> None:
    table = build(name, stages, 6, placement_for(name, stages, processes), recompute="none")
    text = write_torch(table)
    rows = {
        rank: [torch_schedules._Action.from_str(word) for word in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    mapping = torch_schedules._validate_schedule(rows, processes, stages, 6)
    assert mapping == {stage: workers[0] for stage, workers in enumerate(table.placement.workers)}
    again = read_torch(text, "x.csv")
    assert again.placement == table.placement
    assert simulate(again, Costs(10, 20)).total_seconds == simulate(table, Costs(10, 20)).total_seconds


def test_messages_and_empty_cells_of_torch_are_left_out() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert write_torch(read_torch(text, "x.csv")) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0,0B0\n", "line 1: '0X0' is no action of torch's CSV; write F, B, I or W"),
        ("0F0,0B0\n0F0,0B0\n", "line 2: stage 0 is in line 1 too"),
        ("1F0,1B0\n", r"the stages \[1\]; stages have the numbers from 0"),
        ("", r"the stages \[\]"),
    ],
)
def test_a_file_that_is_no_table(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_torch(text, "x.csv")


def test_torch_has_no_recomputation() -> None:
    with pytest.raises(ScheduleError, match="the table has R; use recompute none"):
        write_torch(build("gpipe", 2, 2, recompute="stage"))


def test_the_command_needs_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bubble of a table could only be seen with the recipe of a model."""
    file = tmp_path / "mine.csv"
    assert main(["1f1b", "--stages", "4", "--micro-batches", "8", "--output", str(file)]) == 0
    assert "bubble 27.3%" in capsys.readouterr().out
    assert main([str(file), "--f", "10", "--b", "20", "--w", "10", "--picture", str(tmp_path / "a.png")]) == 0
    assert "total 330 s, bubble 27.3%" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(file), "--output", str(tmp_path / "mine.txt")]) == 0
    assert main([str(tmp_path / "mine.txt")]) == 0
    for words, message in (
        (["nothing"], "'nothing' is neither a file"),
        ([str(tmp_path / "no.csv")], "cannot read the table"),
        (["1f1b", "--w", "3"], "W is a part of B"),
        (["1f1b", "--output", "a.pdf"], "ends in .txt, or for torch in .csv"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
