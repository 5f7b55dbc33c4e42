"""Saving in the background: the same files as in the foreground, one at a time, told when written, and safe to kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_gpipe.checkpoint import save
from hf_gpipe.checkpoint.digests import DIGESTS_FILE
from hf_gpipe.checkpoint.directory import checkpoints
from hf_gpipe.checkpoint.lock import LOCK_FILE
from hf_gpipe.training import checkpoints as saving
from tests import gloo
from tests.training.toy import trainer, weights

SAVE: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, "dropout": 0.2}
_LONG = 60.0

Saved = tuple[list[tuple[int, int, bool]], dict[str, Any], dict[str, torch.Tensor]]


class Watch(TrainerCallback):
    """Notes each on_save: the step it is told, the updates made by then, and whether the checkpoint has its name."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int, bool]] = []
        self.num_updates = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates += 1

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.saved.append((state.global_step, self.num_updates, path.is_dir()))

    def wait_for_update(self, file: Path) -> None:
        """Wait until the weights are no longer those of the checkpoint that `file` is of, if it is not the last."""
        deadline, step = time.monotonic() + _LONG, int(file.parent.name.split("-")[1].split(".")[0])
        while self.num_updates < min(step + 1, SAVE["max_steps"]):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def holding(hold: Callable[[Path], Any]) -> Any:
    """`save_file` of the weights, which first waits until `hold` returns."""

    def save_file(tensors: Any, file: Path, **kwargs: Any) -> None:
        if file.name.startswith("model"):
            hold(file)
        torch_save_file(tensors, file, **kwargs)

    return save_file


torch_save_file = save.save_file


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """The digests of the tensors of a checkpoint, by file."""
    files = json.loads((checkpoint / DIGESTS_FILE).read_text())["files"]
    return {name: entry for name, entry in files.items() if name.endswith(".safetensors")}


def _save(folder: str, how: str, **values: Any) -> Saved:
    """Train; in the background nothing is written before the weights have changed."""
    watch = Watch()
    if how == "always":
        save.save_file = holding(watch.wait_for_update)
    try:
        made = trainer(Path(folder) / how, callbacks=[watch], save_in_background=how, **SAVE | values)
        made.train()
    finally:
        save.save_file = torch_save_file
    hidden = {path.name for path in (Path(folder) / how).iterdir() if path.name.startswith(".")}
    assert hidden <= {LOCK_FILE}
    return watch.saved, {path.name: tensors_of(path) for path in checkpoints(Path(folder) / how)}, weights(made)


def _save_both(folder: str) -> tuple[Saved, Saved]:
    # Without clipping, processes go on to their next step alone.
    values = {"num_stages": 3, "max_grad_norm": 0.0}
    return _save(folder, "never", **values), _save(folder, "always", **values)


def check_same(waiting: Saved, beside: Saved) -> None:
    """The steps 2, 4 and, at the end, 5: the files of the first two are written while the weights change."""
    assert waiting[0] == [(2, 2, True), (4, 4, True), (5, 5, True)]
    assert [(step, exists) for step, _, exists in beside[0]] == [(2, True), (4, True), (5, True)]
    updates = [count for _, count, _ in beside[0]]
    assert 3 <= updates[0] <= 4, "a second save waits for the first"
    assert updates[1:] == [5, 5]
    assert beside[1].keys() == {"checkpoint-2", "checkpoint-4", "checkpoint-5"}
    assert beside[1] == waiting[1]
    assert beside[2].keys() == waiting[2].keys()
    for name, tensor in waiting[2].items():
        assert torch.equal(beside[2][name], tensor), name


def test_it_writes_what_a_save_in_the_foreground_writes(tmp_path: Path) -> None:
    check_same(_save(str(tmp_path), "never"), _save(str(tmp_path), "always"))


def test_two_processes_write_the_same(tmp_path: Path) -> None:
    for waiting, beside in gloo.run_gloo(_save_both, 2, str(tmp_path)):
        check_same(waiting, beside)


def test_a_checkpoint_for_whose_copy_there_is_no_memory_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving, "available_memory", lambda: 1000)
    trainer(tmp_path, **SAVE).train()
    assert caplog.text.count("the training waits while a checkpoint is written") == 1


def test_a_callback_with_on_save_finds_the_model_of_the_checkpoint(tmp_path: Path) -> None:
    """It was called when the checkpoint was written, some steps later, with the model of then."""
    saved, _, _ = _save(str(tmp_path), "auto")
    assert saved == [(2, 2, True), (4, 4, True), (5, 5, True)]


class _FailAt(TrainerCallback):
    """Ends the training in a step, and only then lets the checkpoint be written."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.has_failed = threading.Event()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            threading.Timer(0.1, self.has_failed.set).start()
            raise RuntimeError("injected")


def test_a_training_that_fails_leaves_the_checkpoint_that_it_had_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = _FailAt(3)
    monkeypatch.setattr(save, "save_file", holding(lambda file: fail.has_failed.wait(_LONG)))
    made = trainer(tmp_path, callbacks=[fail], save_in_background="always", **SAVE)
    with pytest.raises(RuntimeError, match="injected"):
        made.train()
    assert os.listdir(tmp_path / "checkpoint-2")


def _train_and_be_killed(folder: str) -> None:
    torch.set_num_threads(1)
    watch = Watch()

    def hold(file: Path) -> None:
        watch.wait_for_update(file)
        if file.parent.name == ".checkpoint-4.tmp" and "00002-of" in file.name:
            os.kill(os.getpid(), signal.SIGKILL)

    save.save_file = holding(hold)
    trainer(Path(folder), callbacks=[watch], save_in_background="always", **SAVE).train()


def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_train_and_be_killed, args=(str(tmp_path),))
    process.start()
    process.join(_LONG)
    assert process.exitcode == -signal.SIGKILL
    assert {path.name for path in tmp_path.glob("*checkpoint*")} == {".checkpoint-4.tmp", "checkpoint-2"}
    whole, resumed = trainer(tmp_path / "whole", **SAVE), trainer(tmp_path, **SAVE)
    whole.train()
    assert resumed.train(resume_from_checkpoint=True).global_step == 5
    assert not (tmp_path / ".checkpoint-4.tmp").exists()
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
