from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_gpipe.checkpoint import in_memory
from hf_gpipe.checkpoint.directory import checkpoints
from hf_gpipe.checkpoint.in_memory import MemoryCheckpoints
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.job.job import Job
from hf_gpipe.job.world import World
from hf_gpipe.training.checkpoints import Checkpoints
from tests.gloo import run_gloo
from tests.training.toy import arguments, trainer, weights

LOST_AT, STEPS = 4, 6


class LostMachineError(Exception):
    """Stands for the loss of a machine."""


class LosesMachine(TrainerCallback):
    """Ends the training after some steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LOST_AT:
            raise LostMachineError


def be_on(folder: Path, machines: list[int]) -> None:
    """Let this process be on the machine of its rank in the list, each with a memory of its own."""
    machine = machines[dist.get_rank()]
    root = folder / f"memory-{machine}"
    root.mkdir(exist_ok=True)
    in_memory.ROOT = root
    socket.gethostname = lambda: f"host{machine}"
    Job.current()._ranks = ()  # as in new processes


def trained_in_memory(folder: Path, **values: Any) -> Any:
    values |= {"memory_save_steps": 1, "max_steps": STEPS, "save_in_background": "always", "num_stages": 3}
    return trainer(folder / "out", **values)


def _train_until_lost(folder: Path) -> tuple[list[str], set[str]]:
    """The checkpoints in the memory of this process's machine, and the newest one's files of tensors."""
    be_on(folder, [0, 1, 2])
    made = trained_in_memory(folder, callbacks=[LosesMachine()])
    with pytest.raises(LostMachineError):
        made.train()
    (run,) = in_memory.ROOT.iterdir()
    kept = checkpoints(run)
    return [path.name for path in kept], {path.name.split(".")[0] for path in kept[-1].rglob("*.safetensors")}


def _found(folder: Path, machines: list[int]) -> Path | None:
    be_on(folder, machines)
    return MemoryCheckpoints(folder / "out", World.of_job()).find(after=LOST_AT - 1)


def _resume(folder: Path) -> tuple[int, dict[str, torch.Tensor], bool]:
    """The step that the training resumes from, the weights at its end, and whether nothing is left in memory."""
    assert _found(folder, [0, 3, 4]) is None, "the files of stage 1 are on machines 1 and 2"
    be_on(folder, [2, 3, 0])
    steps, resume = [], Checkpoints.resume

    def noting(self: Checkpoints, checkpoint: Path, *others: Any) -> Any:
        assert in_memory.ROOT in checkpoint.parents
        steps.append(int(checkpoint.name.rpartition("-")[2]))
        return resume(self, checkpoint, *others)

    Checkpoints.resume = noting  # type: ignore[method-assign]
    made = trained_in_memory(folder)
    made.train(resume_from_checkpoint=True)
    return steps[0], weights(made), not any(in_memory.ROOT.iterdir())


def test_a_run_goes_on_from_memory_after_one_machine_of_three_is_lost(tmp_path: Path) -> None:
    everyone = run_gloo(_train_until_lost, 3, tmp_path)
    for machine, (names, files) in enumerate(everyone):
        assert names == [f"checkpoint-{LOST_AT}"]
        stages = (machine, (machine - 1) % 3)  # its own, and that of the machine before
        assert files == {f"{stem}-{stage + 1:05d}-of-00003" for stem in ("model", "optimizer") for stage in stages}
    assert not checkpoints(tmp_path / "out")
    whole = trainer(tmp_path / "whole", max_steps=STEPS)
    whole.train()
    expected = weights(whole)
    for step, found, is_forgotten in run_gloo(_resume, 3, tmp_path):  # machine 1 is lost, machine 3 has nothing
        assert step == LOST_AT
        assert is_forgotten
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)


def one_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The newest checkpoint in memory of a run in one process that has failed."""
    (folder / "memory").mkdir()
    monkeypatch.setattr(in_memory, "ROOT", folder / "memory")
    values: dict[str, Any] = {"memory_save_steps": 2, "save_strategy": "steps", "save_steps": 3}
    with pytest.raises(LostMachineError):
        trainer(folder / "out", max_steps=STEPS, callbacks=[LosesMachine()], **values).train()
    (path,) = (folder / "memory").glob("*/checkpoint-*")
    return path


def test_the_newest_checkpoint_counts_and_a_damaged_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = one_checkpoint(tmp_path, monkeypatch), tmp_path / "out"
    assert path.name == f"checkpoint-{LOST_AT}"
    world = World.of_job()
    memory = MemoryCheckpoints(out, world)
    assert in_memory.newest_checkpoint(out, world, memory) == path
    assert in_memory.newest_checkpoint(out, world, None) == out / "checkpoint-3"
    assert memory.find(after=LOST_AT) is None
    file = next(path.glob("model*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert in_memory.newest_checkpoint(out, world, memory) == out / "checkpoint-3"
    assert "is damaged" in caplog.text
    # A new run in a new directory of the same name.
    (out / in_memory.NAME_FILE).unlink()
    assert MemoryCheckpoints(out, world).folder != memory.folder


def test_what_cannot_be_kept_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="save_only_model=True contradicts memory_save_steps"):
        arguments(tmp_path, memory_save_steps=1, save_only_model=True)
    with pytest.raises(UserError, match="memory_save_steps=0: expected a whole number of at least 1"):
        arguments(tmp_path, memory_save_steps=0)
    monkeypatch.setattr(in_memory, "ROOT", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no .*nowhere; leave memory_save_steps out"):
        MemoryCheckpoints(tmp_path, World.of_job())
