from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_gpipe import Pipeline
from hf_gpipe.adapters.text import num_tokens
from hf_gpipe.errors import CheckpointError
from hf_gpipe.runtime.memory import peak_memory_bytes
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Action
from hf_gpipe.training.meter import Meter
from hf_gpipe.training.progress import MetricsFile, words
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config
from tests.training.toy import Recorder, Rows, trainer


def test_tokens_are_those_of_sources_and_targets_without_padding() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [5, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "labels": torch.tensor([[8, 1], [-100, -100]]),
    }
    assert num_tokens(batch, decoder_only=False) == 6
    assert num_tokens(batch, decoder_only=True) == 4
    del batch["attention_mask"]
    assert num_tokens(batch, decoder_only=True) == 6


def test_the_peak_of_memory_grows_with_what_is_allocated() -> None:
    before = peak_memory_bytes([torch.device("cpu")])
    size = before + 64 * 2**20
    held = torch.ones(size // 4)
    assert size <= peak_memory_bytes([torch.device("cpu")]) < size + before + 64 * 2**20
    assert held.sum() > 0


def meter(timeline_steps: int | None = None) -> Meter:
    return Meter(Pipeline(tiny_config("marian"), 2, 2, device="cpu"), timeline_steps)


def test_only_the_updates_asked_for_are_timed() -> None:
    assert [meter().times(step) for step in range(1, 5)] == [None] * 4
    assert [meter(3).times(step) is not None for step in range(1, 8)] == [False, False, True, False, False, True, False]
    # Windows of four steps, of which 3, 6 and 9, and 12 are to be timed.
    assert [meter(3).times(first, 4) is not None for first in (1, 5, 9)] == [True] * 3
    assert [meter(6).times(first, 4) is not None for first in (1, 5, 9)] == [False, True, True]


def test_an_update_of_left_over_rows_is_not_timed() -> None:
    """The last update of each epoch was the one timed, where `timeline_steps` is the number of updates of an epoch."""
    one = meter(3)
    assert [step for step in range(1, 9) if one.times(step, is_whole=step % 3 > 0) is not None] == [4, 7]


def test_the_bubble_is_the_waiting_of_the_timed_updates() -> None:
    one = meter(2)
    times = one.times(2)
    assert times is not None
    times += [ActionTime(Action.parse("0F0"), 10.0, 12.0), ActionTime(Action.parse("0B0"), 12.0, 20.0, 4.0, 1.0)]
    assert one.read()["bubble"] == pytest.approx(0.4)
    assert "bubble" not in one.read(), "nothing was timed since"


def test_evaluating_is_no_training() -> None:
    one = meter()
    with one.paused():
        time.sleep(0.3)
    one.count([padded_batch(tiny_config("marian"))])
    assert one.read()["tokens_per_second"] > 100


def _logs(folder: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    recorder = Recorder()
    trainer(Path(folder), callbacks=[recorder], max_steps=6, logging_steps=2, train_dataset=Rows(24), **values).train()
    return [logs for logs in recorder.logs if "loss" in logs]


def test_the_logs_of_a_training_are_the_same_in_every_process(tmp_path: Path) -> None:
    first, second = run_gloo(_logs, 2, str(tmp_path), {"timeline_steps": 4, "num_stages": 2, "num_micro_batches": 2})
    assert first == second
    assert [("bubble" in logs) for logs in first] == [False, True, False]
    assert 0 < first[1]["bubble"] < 1
    for logs in first:
        assert logs["tokens_per_second"] > 0
        assert logs["peak_memory_bytes"] == max(logs[f"peak_memory_bytes_stage_{stage}"] for stage in (0, 1)) > 2**20
    assert [logs["seconds_left"] > 0 for logs in first] == [True, True, False]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["bubble"] for line in lines if "bubble" in line] == [first[1]["bubble"]]


def _steps_with_a_bubble(folder: str) -> list[int]:
    recorder = Recorder()
    options = {"max_steps": 6, "timeline_steps": 3, "num_stages": 2, "num_micro_batches": 2}
    trainer(Path(folder), callbacks=[recorder], train_dataset=Rows(10), **options).train()
    return [
        number for number, logs in enumerate((one for one in recorder.logs if "loss" in one), 1) if "bubble" in logs
    ]


def test_the_bubble_is_of_whole_mini_batches(tmp_path: Path) -> None:
    """Steps 3 and 6 have the two rows that epochs of ten leave over, and were those that the bubble was of."""
    assert run_gloo(_steps_with_a_bubble, 2, str(tmp_path)) == [[4], [4]]


def test_the_progress_line_has_the_time_left_and_the_memory_of_each_stage() -> None:
    logs = {"loss": 2.0, "epoch": 1.0, "tokens_per_second": 1234.5, "training_seconds": 2.0, "seconds_left": 3723.4}
    logs |= {"peak_memory_bytes": 2.5e9, "peak_memory_bytes_stage_0": 2.5e9, "peak_memory_bytes_stage_1": 2.504e9}
    shown = {"loss": "2.0000", "tokens_per_second": "1,234", "left": "1:02:03", "memory": "2.50 GB"}
    assert words(logs | {"mine": 3}) == {**shown, "mine": "3"}
    assert words(logs | {"peak_memory_bytes_stage_1": 1e9})["memory"] == "2.50/1.00 GB"


def test_damaged_lines_of_the_metrics_are_left_out_of_a_resumed_run(tmp_path: Path) -> None:
    good = b'{"step": 1, "loss": NaN}\n'
    damaged = [
        b"\xff\xfe\n",
        b"[" * 9000 + b"\n",
        b'{"step": "1"}\n',
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b'{"step": 9}',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(good + b"".join(damaged))
    arguments = TrainingArguments(output_dir=str(tmp_path))
    MetricsFile().on_train_begin(arguments, TrainerState(global_step=2), TrainerControl())
    assert (tmp_path / "metrics.jsonl").read_bytes() == good


def test_metrics_stay_where_a_resumed_training_cannot_write_them(tmp_path: Path) -> None:
    """A full disk emptied the file of a training that was to go on: its lines were written again in place."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2)))
    before = path.read_bytes()
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, most))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*File too large"):
            MetricsFile().on_train_begin(
                TrainingArguments(output_dir=str(tmp_path)), TrainerState(global_step=2), TrainerControl()
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]
