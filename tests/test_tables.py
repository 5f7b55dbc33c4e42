"""A table that someone wrote trains to the plain model's numbers, in one process and in two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_gpipe import Pipeline
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.schedule import Action, Costs, Placement, Schedule, simulate
from hf_gpipe.schedule.kinds import RECOMPUTE, UPDATE
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from tests.gloo import run_gloo
from tests.oracle import Result, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

#: Three stages on two processes, the first and the last of them together; micro-batch 1 goes first, stage 2 keeps two
#: graphs of three, and a recomputation stands far before its backward.
ODD = """\
table: 10
schedule: odd
num_stages: 3
num_micro_batches: 3
placement: 0 1 0
process 0: 0F1 0F0 2F1 2B1 0F2 2F0 0R0 2F2 2B0 0B1 2R2 2B2 0B0 0B2 2U 0U
process 1: 1F1 1F0 1R0 1B1 1F2 1B0 1B2 1U
"""
#: The same order of work for one process.
ALONE = """\
table: 10
schedule: odd, alone
num_stages: 3
num_micro_batches: 3
placement: 0 0 0
process 0: 0F1 1F1 0F0 2F1 2B1 1F0 1R0 0F2 1B1 2F0 0R0 1F2 2F2 2B0 0B1 1B0 2R2 2B2 0B0 1B2 0B2 2U 0U 1U
"""


def written(folder: Path, text: str) -> str:
    path = folder / "odd.txt"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("rows", [6, 2])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_a_table_in_one_process(family: str, rows: int, tmp_path: Path) -> None:
    """A mini-batch with fewer rows than micro-batches runs the actions of those that it has."""
    config = tiny_config(family)
    batch, plain = padded_batch(config, rows=rows), plain_model(config)
    expected = run_plain(plain, batch, 3)
    pipe = Pipeline(plain, 3, 3, written(tmp_path, ALONE))
    assert pipe.schedule(3).text() == ALONE
    assert pipe.recompute == (3, 2, 1)
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_a_table_in_two_processes(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    expected = [run_plain(plain_model(config), padded_batch(config, rows=rows), 3) for rows in (6, 2)]
    for found in run_gloo(results, 2, family, written(tmp_path, ODD)):
        for one, other in zip(found["results"], expected, strict=True):
            assert_same(one, other)
        assert found["loss"] == pytest.approx(expected[0].loss, rel=1e-10)
        assert found["error"] == "there is no file missing.txt"


def results(family: str, path: str) -> dict[str, Any]:
    """The file is read in the main process alone: the other one knows another path."""
    is_main = dist.get_rank() == 0
    config = tiny_config(family)
    pipe = Pipeline(plain_model(config), 3, 3, path if is_main else "nowhere.txt")
    assert pipe.schedule(3).text() == ODD
    batches = [padded_batch(config, rows=rows) if is_main else None for rows in (6, 2)]
    found: list[Result] = [run_pipeline(pipe, batch) for batch in batches]
    try:
        Pipeline(config, 3, 3, "missing.txt" if is_main else path)
    except UserError as error:
        words = str(error).removeprefix("schedule: ").partition(" (")[0]
    return {"results": found, "loss": pipe.eval_step(batches[0]).loss, "error": words}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_table_of_list_scheduling_that_recomputes_single_micro_batches(num_stages: int, tmp_path: Path) -> None:
    config, count = tiny_config("llama"), 6
    ones = [1.0] * num_stages
    work = Work(ones, ones, ones, [8] * num_stages, [5] * num_stages, [0.0] * (num_stages - 1), ones, ones)
    found = best_listed(Placement.one_stage_each(num_stages), count, work, [12] * num_stages, effort=5_000)
    rows = [(*order, Action(UPDATE, stage)) for stage, order in enumerate(found.orders)]
    table = Schedule("made", num_stages, count, Placement.one_stage_each(num_stages), tuple(rows))
    # In one process, in the order in which they start.
    spans = sorted(simulate(table, Costs(1, 2)).spans, key=lambda span: (span.action.kind == UPDATE, span.start))
    alone = replace(table, placement=Placement([0] * num_stages), actions=(tuple(span.action for span in spans),))
    pipe = Pipeline(plain_model(config), num_stages, count, written(tmp_path, alone.text()))
    assert any(0 < table.num_actions(stage, RECOMPUTE) < count for stage in range(num_stages))
    assert table.split
    batch = padded_batch(config)
    assert_same(run_pipeline(pipe, batch), run_plain(plain_model(config), batch, count))


def test_auto_makes_a_table_and_tells_all_processes() -> None:
    config = tiny_config("llama")
    expected = run_plain(plain_model(config), padded_batch(config), 6)
    for name, text, result, planned in run_gloo(made, 3):
        assert name == "auto.txt"
        assert "schedule: auto.txt" in text
        assert "R" in text
        assert planned == text
        assert_same(result, expected)


def made() -> tuple[str, str, Result, str]:
    config = tiny_config("llama")
    is_main = dist.get_rank() == 0
    batch = padded_batch(config) if is_main else None
    pipe = Pipeline(
        plain_model(config), 3, 6, "auto", recompute="auto", partition="auto", example=batch, memory="200KiB"
    )
    assert (pipe.planned is None) != is_main or "a table made for this plan" in str(pipe.planned)
    planned = pipe.plan(padded_batch(config)).timeline.schedule.text() if is_main else pipe.schedule(6).text()
    return pipe.schedule_name, pipe.schedule(6).text(), run_pipeline(pipe, batch), planned


def test_a_table_has_the_micro_batches_of_all_accumulated_mini_batches(tmp_path: Path) -> None:
    config = tiny_config("llama")
    batches = [padded_batch(config, rows=2, seed=seed) for seed in (1, 2, 3)]
    plain = plain_model(config)
    expected = float(Pipeline(plain, 3, 1).train_step(batches))
    pipe = Pipeline(plain, 3, 1, written(tmp_path, ALONE), accumulation=3, example=batches[0])
    assert float(pipe.train_step(batches)) == pytest.approx(expected, rel=1e-12)
    assert [pipe.plan(given).timeline.schedule.num_micro_batches for given in (None, batches[0])] == [3, 1]
    with pytest.raises(ScheduleError, match="a step has 4 micro-batches and the table 'odd, alone' 3"):
        pipe.train_step([*batches, batches[0]])


def test_the_planner_plans_with_a_table(tmp_path: Path) -> None:
    config = tiny_config("llama")
    path, batch = written(tmp_path, ALONE), padded_batch(config)
    pipe = Pipeline(plain_model(config), 3, 3, path, partition="auto", example=batch, memory="100MiB")
    assert pipe.planned is not None
    plan = pipe.plan()
    assert plan.timeline.schedule == pipe.schedule(3)
    assert plan.settings.schedule == pipe.schedule_name == path
    assert [stage.recompute for stage in plan.stages] == ["3", "2", "1"]
    assert_same(run_pipeline(pipe, batch), run_plain(plain_model(config), batch, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 2}, "line 3: the table has 3 stages, and num_stages is 2"),
        ({"num_micro_batches": 4}, "line 4: the table has 3 micro-batches"),
        ({"num_micro_batches": "auto"}, "line 4: the table has 3 micro-batches"),
        ({"accumulation": 2}, "line 4: the table has 3 micro-batches, .* is 6"),
        ({"recompute": "none"}, "recompute is 'none', and the table 'odd, alone' gives the recomputations by its R"),
        ({"recompute": "auto"}, "recompute is 'auto', and the table"),
        (
            {"schedule": "mine.tbl"},
            "schedule: found 'mine.tbl' .*, expected 'naive', .* the path of a file that ends in .txt or null",
        ),
    ],
)
def test_what_contradicts_a_table_is_found_before_the_model_is_read(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments = {"num_stages": 3, "num_micro_batches": 3, "schedule": written(tmp_path, ALONE)} | changes
    with pytest.raises(UserError, match=message):
        Pipeline("/nowhere", **arguments)


def test_a_table_for_other_processes(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"odd.txt, line 5: the table is for 2 processes, and there are 1"):
        Pipeline("/nowhere", 3, 3, written(tmp_path, ODD))


def test_a_builder_s_table_from_a_file_trains_bit_by_bit_as_the_builder(tmp_path: Path) -> None:
    config = tiny_config("marian", dropout=0.1)
    batch = padded_batch(config)
    first = Pipeline(plain_model(config), 3, 4, "1f1b")
    second = Pipeline(plain_model(config), 3, 4, written(tmp_path, first.schedule(4).text()))
    one, other = run_pipeline(first, batch), run_pipeline(second, batch)
    assert one.loss == other.loss
    for name, gradient in one.gradients.items():
        assert torch.equal(gradient, other.gradients[name])
