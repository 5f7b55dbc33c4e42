"""What a run says that it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.from_recipe.cost import CostMeter, Speed
from hf_gpipe.from_recipe.timeline import measure_step
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import Workload
from tests.oracle import padded_batch, tiny_config
from tests.training.toy import Recorder, Rows, trainer


def line(step: int, tokens_per_second: float, training_seconds: float) -> dict[str, Any]:
    return {"step": step, "tokens_per_second": tokens_per_second, "training_seconds": training_seconds}


def test_speed_counts_every_line_by_its_time_and_not_the_evaluations() -> None:
    log = [line(1, 10.0, 4.0), {"step": 10, "eval_loss": 1.0}, line(11, 100.0, 10.0), line(21, 100.0, 20.0)]
    speed = Speed.from_log(log)
    assert speed.num_steps == 21
    assert speed.training_seconds == 34.0
    assert speed.tokens_per_second == pytest.approx((40 + 1000 + 2000) / 34)
    assert speed.seconds_per_step == 2.0, "the median of 4, 1 and 2: the slow first step does not count"


def test_a_short_last_line_does_not_count() -> None:
    """The one step of the last line, with the rows that the epoch left over, changed the seconds of a step by half."""
    log = [line(20, 100.0, 40.0), line(21, 100.0, 0.2)]
    assert Speed.from_log(log).seconds_per_step == 2.0
    assert Speed.from_log(log).num_steps == 21


def test_without_a_line_nothing_is_known() -> None:
    assert Speed.from_log([{"step": 1, "loss": 2.0}]) == Speed(0, 0.0, None, None)


def test_a_resumed_training_counts_the_updates_before_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "save_steps": 4, "train_dataset": Rows(24)}
    trainer(tmp_path, callbacks=[Recorder()], **{**options, "max_steps": 4}).train()
    resumed = trainer(tmp_path, callbacks=[Recorder()], **options)
    resumed.train(resume_from_checkpoint=True)
    speed = Speed.from_log(resumed.state.log_history)
    assert speed.num_steps == 6
    assert 0 < speed.training_seconds < 60


def test_the_cost_of_a_run_and_what_the_planner_says_of_it() -> None:
    config = tiny_config("marian")
    batch = padded_batch(config)
    rows = len(batch["input_ids"])
    meter = CostMeter()
    pipe = Pipeline(config, 2, 2, "gpipe", "stage", "count", device="cpu", example=Workload(rows, 64, 64))
    meter.note_memory(pipe)
    measured, _ = measure_step(pipe, [batch], repeats=1)
    cost = meter.cost(pipe, [line(1, 10.0, 4.0)], measured, [batch], first_step=0)
    assert cost["num_parameters"] == sum(p.numel() for p in pipe.parameters())
    assert cost["step_seconds"] == float(measured.total_seconds) > 0
    assert (cost["num_stages"], cost["num_micro_batches"], cost["schedule"]) == (2, 2, "gpipe")
    assert len(cost["peak_bytes"]) == 1
    assert cost["peak_bytes"][0] > 2**20
    predicted = cost["predicted"]
    assert predicted["step_seconds"] > 0
    # Of the longest mini-batch, which is longer than the one that was measured.
    assert predicted["peak_bytes"][0] > pipe.plan(batch).peak_bytes


def test_a_prediction_that_fails_is_said_and_fails_nothing() -> None:
    config = tiny_config("marian")
    pipe, batch = Pipeline(config, 1, 1, device="cpu"), padded_batch(config)
    measured, _ = measure_step(pipe, [batch], repeats=1)
    # Without an example the longest mini-batch is not known.
    assert "example" in CostMeter().cost(pipe, [], measured, [batch], 0)["predicted"]["error"]
