"""The benchmarks run, on models and waits that take no time, and what they count is right.

One forked process runs all of them; figures of speed mean nothing here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import bench_chunks
import bench_emulated
import bench_head
import bench_memory
import bench_micro_batches
import bench_peers
import bench_tables
import pytest
import torch
from bench.measure import Measured
from bench.report import paired, table
from bench.saved_bytes import SavedBytes
from bench.settings import SETTINGS

from hf_gpipe.schedule import training_schedules
from tests import forked_command
from tests.versions import OLD_TORCH

#: Of the comparison with other trainers.
PEERS = [
    *("--settings", "on", "lengths", "zero_bubble", "pipedream", "mesh"),
    *("--only", "single", "ours auto 770 MB", "ours 1f1b none bucketed"),
    *(
        "torch DDP x Schedule1F1B",
        "ours 2 x 2 zero 1",
        # With gloo, torch 2.11's stages of one process cannot send to each other.
        *(() if OLD_TORCH else ("torch ScheduleZBVZeroBubble",)),
        "ours zb_v none",
        "ours pipedream none",
    ),
]


def run_all(folder: Path) -> int:
    """The largest exit code: 1 is also that of a case that ended at another loss."""
    commands = {
        "resnet": (bench_micro_batches.main, ["resnet", "--micro-batches", "4"]),
        "chunks": (bench_chunks.main, []),
        "emulated": (bench_emulated.main, []),
        "head": (bench_head.main, []),
        "memory": (bench_memory.main, []),
        "peers": (bench_peers.main, PEERS),
        "table2": (bench_micro_batches.main, ["llama"]),
        "tables": (bench_tables.main, ["--steps", "2"]),
    }
    return max(main(["--quick", "--json", f"{folder}/{name}.json", *words]) for name, (main, words) in commands.items())


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each benchmark wrote, by its name."""
    folder = tmp_path_factory.mktemp("benches")
    process = forked_command.start_function(folder, run_all, folder)
    process.join(280)
    assert process.exitcode == 0, (folder / "run.out").read_text() + (folder / "run.err").read_text()
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_every_training_schedule_is_emulated(figures: dict[str, Any]) -> None:
    seen = {one["setting"]["name"].split(",")[0] for one in figures["emulated"]["results"]}
    assert seen >= set(training_schedules()) | {"pipedream", "pipedream_vertical"}


def test_no_emulated_step_is_faster_than_its_table(figures: dict[str, Any]) -> None:
    for one in figures["emulated"]["results"]:
        # The table does not know that a reduction begins inside of the last backward.
        assert min(one["seconds"]) >= one["predicted_seconds"] - one["setting"]["reduce_seconds"]
    assert {one["setting"]["replicas"] for one in figures["emulated"]["results"]} == {1, 2}


def test_saved_bytes_follow_the_formula(figures: dict[str, Any]) -> None:
    """O(N + (L/K)(N/M)) under stage recomputation, as in GPipe, section 2.3."""
    rows = figures["memory"]["rows"]
    assert {row["recompute"] for row in rows} == {"none", "block", "stage"}
    for row in rows:
        assert row["saved_bytes"] == pytest.approx(row["formula_bytes"], rel=0.05), row


def test_the_head_is_measured_both_ways(figures: dict[str, Any]) -> None:
    for row in figures["head"]["rows"]:
        assert {how: len(runs) for how, runs in row["runs"].items()} == {"whole": 1, "chunks": 1}


def test_chunks_of_a_row_have_the_loss_of_the_row(figures: dict[str, Any]) -> None:
    rows = figures["chunks"]["rows"]
    assert [row["chunks"] for row in rows] == [1, 8, 8]
    losses = [run[0]["losses"] for row in rows for run in row["runs"]]
    assert all(one == pytest.approx(losses[0], rel=1e-5) for one in losses)


def test_all_trainers_end_at_one_loss(figures: dict[str, Any]) -> None:
    for result in figures["peers"]["results"]:
        losses = [one["losses"][-1] for name, runs in result["runs"].items() for one in runs if "pipedream" not in name]
        assert losses
        assert len(result["runs"]) >= 2
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def test_table2_has_a_cell_for_each_number_of_processes_and_micro_batches(figures: dict[str, Any]) -> None:
    cells = {(one["K"], one["M"]) for one in figures["table2"]["emulated"]}
    assert cells == {(k, m) for k in (2, 4, 8) for m in (1, 4)}
    assert {one["case"] for one in figures["table2"]["measured"]} == {"single", "twin", "ours gpipe", "ours 1f1b"}
    found = [(one["case"], one["M"]) for one in figures["resnet"]["measured"]]
    assert found == [("single", 1), ("ours gpipe", 1), ("twin", 4), ("ours gpipe", 4)]


def test_a_made_table_is_never_longer_than_a_named_one(figures: dict[str, Any]) -> None:
    for _, _, _, predicted, _, measured, *_ in figures["tables"]["rows"]:
        named, made = map(float, predicted.split(" / "))
        assert made <= named
        assert min(map(float, measured.split(" / "))) > 0


# ---------------------------------------------------------------------- what they count with


def test_ratios_are_paired() -> None:
    """Each repetition was twice as slow as the one before, and the ratio is the same in all."""
    spread = paired([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (spread.median, spread.low, spread.high) == (2.0, 2.0, 2.0)
    assert table(["a", "K"], [["x", "16"]]) == "| a   |   K |\n| --- | --: |\n| x   |  16 |"


def test_a_step_that_needs_no_more_memory_has_no_ratio() -> None:
    """The tiny one of this test did so once, and the script ended with a ZeroDivisionError."""
    run = {"seconds": [1.0], "grown_bytes": 0, "loss": 1.0}
    assert bench_head.row(64, {"whole": [run], "chunks": [run]})[-1] == "-"


def test_saved_bytes_are_those_that_are_alive_at_once() -> None:
    weight = torch.ones(4, requires_grad=True)
    saved = SavedBytes([weight])
    x = torch.ones(4)
    with saved.counting():
        first = (weight * x) * x  # x twice, 16 bytes; the weight does not count
        assert saved.peak_bytes == 16
        first.exp().sum().backward()  # exp saves its output of 16 bytes
        assert saved.peak_bytes == 32
        del first
        y = torch.ones(4)
        (weight * y).sum().backward()  # all of the above has gone
    assert saved.peak_bytes == 32


def test_a_case_that_trains_otherwise_is_found() -> None:
    setting = SETTINGS[0]
    runs = {case.name: [Measured(1.0, [5.0, 4.0], [1], [None])] for case in setting.cases}
    assert not bench_peers.differing(setting, runs)
    runs["DDP"] = [Measured(1.0, [5.0, 4.001], [1], [None])]
    assert [line.split()[1] for line in bench_peers.differing(setting, runs)] == ["DDP"]
    runs["DDP"] = [Measured(1.0, [5.0, math.nan], [1], [None])]
    assert bench_peers.differing(setting, runs)
