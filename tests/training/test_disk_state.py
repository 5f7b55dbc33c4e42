"""The optimizer's state on a disk: the numbers and checkpoints of a run whose state is in memory."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from hf_gpipe import PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.training.disk_state import DiskState
from scripts.families import default_config
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, plain_model, tiny_config
from tests.training.toy import CausalRows, Rows, arguments, trainer, weights

VISITING = {"num_stages": 4, "schedule": "breadth_first", "offload_weights": "all"}
MASTERS = {"dtype": torch.bfloat16, "fp32_master_weights": True}


def trained(folder: Path, family: str, resumed: Path | None = None, **values: Any) -> PipelineTrainer:
    common: dict[str, Any] = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    adapters = LoraConfig(r=2, target_modules="all-linear") if family == "qwen3" else None
    config = default_config(family)
    config.vocab_size, config.tie_word_embeddings = VOCABULARY, family == "t5"
    made = PipelineTrainer(
        exact_clone(config, values.pop("dtype", torch.float32)),
        arguments(folder, **common | values),
        train_dataset=Rows() if family == "t5" else CausalRows(),
        data_collator=PairCollator(pad_token_id=0),
        peft_config=adapters,
    )
    made.train(resume_from_checkpoint=None if resumed is None else str(resumed / "checkpoint-2"))
    return made


def assert_equal(found: PipelineTrainer, expected: PipelineTrainer) -> None:
    theirs = weights(expected)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights(found).items())


def saved_state(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "checkpoint-2").glob("**/optimizer-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def mapped_bytes(folder: Path) -> int:
    """The bytes of files of a folder that this process maps."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (line[0].split("-") for line in lines))


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", VISITING),
        ("llama", {"schedule": "1f1b", "max_grad_norm": 0.0, **MASTERS}),
        ("qwen3", VISITING),
        ("t5", {**VISITING, "num_stages": 5, **MASTERS}),
        ("t5", {**VISITING, "schedule": "round_robin", "max_grad_norm": 0.0, **MASTERS}),
    ],
)
def test_a_run_and_those_that_resume_it(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    """The state had to fit the CPU memory."""
    files = {"optimizer_state_dir": str(tmp_path)}
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    on_disk, in_memory = trained(disk, family, **values, **files), trained(memory, family, **values)
    assert_equal(on_disk, in_memory)
    found, expected = saved_state(disk), saved_state(memory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert on_disk.optimizer is not None
    size = sum(t.nbytes for own in on_disk.optimizer.state.values() for t in own.values() if t.dim())
    assert 0 < size <= mapped_bytes(tmp_path)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_file()], "the files have names"
    for given in (files, {}):
        assert_equal(trained(tmp_path / "again", family, disk, **values, **given), in_memory)
    if family != "llama":
        return
    mesh = {**values, "num_stages": 3, "schedule": "gpipe", "offload_weights": None}
    runs = [trained(tmp_path / "mesh", family, start, **mesh, **own) for start, own in ((disk, {}), (memory, files))]
    assert_equal(*runs)


def in_replicas(folder: Path) -> list[float]:
    """Compare runs whose replicas share updates; returns this process's values of state for each parameter."""
    sizes = []
    values: dict[str, Any] = {"num_stages": 1, "replicas": 2, "zero": 1, "schedule": "gpipe", "save_strategy": "no"}
    for own in ({}, MASTERS):
        plain = trained(folder, "llama", **values, **own)
        made = trained(folder, "llama", **values, **own, optimizer_state_dir=str(folder))
        assert_equal(made, plain)
        assert made.optimizer is not None
        parts = [t for slots in made.optimizer.state.values() for t in slots.values() if t.dim()]
        assert sum(t.nbytes for t in parts) <= mapped_bytes(folder)
        sizes.append(sum(t.numel() for t in parts) / sum(p.numel() for p in made.pipe.parameters()))
    return sizes


def test_replicas_that_share_updates(tmp_path: Path) -> None:
    """Each has the state of its own shards."""
    for sizes in run_gloo(in_replicas, 2, tmp_path):
        assert sizes == pytest.approx([1.0, 1.0], rel=0.05)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adadelta", {}),
        ("Adam", {"amsgrad": True}),
        ("Adamax", {}),
        ("AdamW", {"fused": True}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
    ],
)
def test_the_optimizers(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = [torch.nn.Parameter(torch.randn(3, 5).t()), torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter()]
    ours = copy.deepcopy(plain)
    optimizers = [getattr(torch.optim, name)(own, lr=0.1, **options) for own in (plain, ours)]
    DiskState(optimizers[1], str(tmp_path), {p: p.data for p in ours})
    begun = copy.deepcopy(optimizers[0].state_dict())
    for round_number in range(2):
        for _ in range(2):
            gradients = [torch.randn_like(parameter) for parameter in plain]
            for own in (plain, ours):
                for parameter, gradient in zip(own, gradients, strict=True):
                    parameter.grad = gradient.clone() if parameter is not own[1] or round_number else None
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(plain, ours, strict=True):
            assert torch.equal(one, other)
            state = optimizers[0].state[one]
            assert all(torch.equal(value, optimizers[1].state[other][slot]) for slot, value in state.items())
        # As before the first step.
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(begun))


def test_what_cannot_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"family": "llama", "optimizer_state_dir": str(tmp_path / "missing")}
    with pytest.raises(UserError, match=r"missing cannot hold the .*KiB of the optimizer's state.*No such file"):
        trainer(tmp_path, **given).train()
    given["optimizer_state_dir"] = str(tmp_path)
    with pytest.raises(UserError, match=r"the optimizer is torch\.SGD, whose state does not begin with zeros"):
        trainer(tmp_path, **given, optim="sgd").train()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for values, what in (({}, "the optimizer's state"), (MASTERS, "copies of the weights")):
        model = plain_model(tiny_config("llama"), dtype=values.pop("dtype", torch.float32))
        with pytest.raises(UserError, match=rf"of {what} of this process \(No space left on device\); give a folder"):
            trainer(tmp_path, model=model, **given, **values).train()
    assert not [entry for entry in tmp_path.iterdir() if entry.is_file()]
