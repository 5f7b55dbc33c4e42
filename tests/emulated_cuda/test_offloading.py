"""The optimizer's state in CPU memory: the numbers of the device's optimizer, and pinned copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_gpipe import PipelineTrainer
from hf_gpipe.errors import UserError
from tests.emulated_cuda.device import counting
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import padded_batch, plain_model, tiny_config
from tests.training.toy import trainer

CONFIG = tiny_config("llama", tied=True)


def trained(folder: Path, dtype: torch.dtype = torch.float32, resumed: bool = False, **values: Any) -> PipelineTrainer:
    common = {"family": "llama", "use_cpu": False, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    made = trainer(folder, model=plain_model(CONFIG, dtype=dtype), **common | values)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumed else None)
    return made


def on_host(made: PipelineTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in made.pipe.named_parameters()}


@pytest.mark.parametrize("fp32_master_weights", [False, True])
@on_emulated_cuda()
def test_the_host_updates_and_the_device_keeps_no_state(tmp_path: Path, fp32_master_weights: bool) -> None:
    values: dict[str, Any] = {"fp32_master_weights": fp32_master_weights}
    values["dtype"] = torch.bfloat16 if fp32_master_weights else torch.float32
    plain = on_host(trained(tmp_path / "plain", **values))
    made = trained(tmp_path / "offloaded", offload_optimizer=True, **values)
    assert made.optimizer is not None
    states = [tensor for state in made.optimizer.state.values() for tensor in state.values()]
    assert {tensor.device.type for tensor in states} == {"cpu"}
    assert {parameter.device.type for parameter in made.pipe.parameters()} == {"cuda"}
    offloaded = on_host(made)
    for name, found in offloaded.items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=1e-6)
    again = on_host(trained(tmp_path / "offloaded", offload_optimizer=True, resumed=True, **values))
    assert all(torch.equal(tensor, offloaded[name]) for name, tensor in again.items())
    # The checkpoints are the same, so a run may go on without.
    for name, found in on_host(trained(tmp_path / "offloaded", resumed=True, **values)).items():
        torch.testing.assert_close(found, offloaded[name], rtol=0, atol=1e-6)


@on_emulated_cuda()
def test_gradients_and_weights_travel_by_pinned_memory(tmp_path: Path) -> None:
    made = trained(tmp_path, offload_optimizer=True)
    assert made.optimizer is not None
    made.pipe.train_step(padded_batch(CONFIG))
    with counting() as counts:
        made.optimizer.step()
    assert not counts.pageable_copies, str(counts)
    assert len(counts.synchronisations) == 1, str(counts)
    given = torch.optim.SGD(made.pipe.parameters(), lr=0.1), None
    with pytest.raises(UserError, match="optimizers: offload_optimizer needs an optimizer that the trainer makes"):
        trainer(tmp_path, model=made.pipe, use_cpu=False, offload_optimizer=True, optimizers=given)


@on_emulated_cuda(num_processes=2)
def test_replicas_have_shards_of_the_state_on_the_host(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_stages": 1, "replicas": 2, "zero": 1, "dtype": torch.bfloat16}
    values["fp32_master_weights"] = True
    plain = on_host(trained(tmp_path / "plain", **values))
    made = trained(tmp_path / "offloaded", offload_optimizer=True, **values)
    assert made.optimizer is not None
    states = [state["exp_avg"] for state in made.optimizer.state.values()]
    assert {tensor.device.type for tensor in states} == {"cpu"}
    offloaded, size = on_host(made), sum(parameter.numel() for parameter in made.pipe.parameters())
    assert sum(tensor.numel() for tensor in states) == pytest.approx(size / 2, rel=0.01)
    for name, found in offloaded.items():
        torch.testing.assert_close(found, plain[name], rtol=0, atol=1e-6)
    again = on_host(trained(tmp_path / "offloaded", offload_optimizer=True, resumed=True, **values))
    assert all(torch.equal(tensor, offloaded[name]) for name, tensor in again.items())
    # The state in a checkpoint is of whole parameters on the device.
    for name, found in on_host(trained(tmp_path / "offloaded", resumed=True, **values | {"zero": 0})).items():
        torch.testing.assert_close(found, offloaded[name], rtol=0, atol=1e-6)
    made.pipe.train_step(padded_batch(CONFIG))
    with counting() as counts:
        made.optimizer.step()
    assert not counts.pageable_copies, str(counts)


def test_there_is_nothing_to_offload_where_the_stages_are_on_the_host(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="offload_optimizer: the weights are in CPU memory"):
        trainer(tmp_path, offload_optimizer=True)


@on_emulated_cuda()
def test_the_state_on_a_disk(tmp_path: Path) -> None:
    values: dict[str, Any] = {"dtype": torch.bfloat16, "fp32_master_weights": True}
    in_memory = on_host(trained(tmp_path / "memory", offload_optimizer=True, **values))
    values["optimizer_state_dir"] = str(tmp_path)
    found = on_host(trained(tmp_path / "disk", offload_optimizer=True, **values))
    assert all(torch.equal(tensor, in_memory[name]) for name, tensor in found.items())
    with pytest.raises(UserError, match="the optimizer's state is on cuda:0; set offload_optimizer"):
        trained(tmp_path / "device", **values)
