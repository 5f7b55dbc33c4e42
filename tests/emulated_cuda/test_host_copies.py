"""What the host reads from devices is there when it reads it, and what a step leaves behind on each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.checkpoint.writer import copied, on_cpu
from hf_gpipe.runtime.host import read
from hf_gpipe.runtime.timing import ActionTime
from tests.emulated_cuda.device import counting
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import on_emulated_cuda, run_emulated
from tests.oracle import padded_batch, plain_model
from tests.training.toy import trainer

TWO = ["cuda:1", "cuda:2"]


@on_emulated_cuda()
def test_numbers_of_several_devices_are_read_at_once() -> None:
    """None of them is on the current device."""
    parts = [torch.tensor(1.5, device="cuda:1"), torch.ones(2), torch.arange(3, device="cuda:2")]
    with counting() as counts:
        assert read(parts).tolist() == [1.5, 1, 1, 0, 1, 2]
    assert len(counts.synchronisations) == 1, counts
    assert not counts.pageable_copies, counts


@on_emulated_cuda()
def test_copies_for_files_have_their_values() -> None:
    values = torch.arange(12.0).view(3, 4)
    tensors = {device: values.to(device) for device in ("cuda:0", *TWO, "cpu")}
    tensors |= {f"{device} strided": tensor.t() for device, tensor in tensors.items()}
    for copy in (on_cpu, copied):
        with counting() as counts:
            copies = copy(tensors)
        assert not counts.pageable_copies, counts
        for name, found in copies.items():
            assert torch.equal(found, values.t() if "strided" in name else values), name
            assert found.is_contiguous() or copy is copied


def losses(device: Any, batch_device: str) -> list[float]:
    config = config_of("marian")
    pipe = Pipeline(plain_model(config), 2, 2, device=device)
    batch = {name: tensor.to(batch_device) for name, tensor in padded_batch(config).items()}
    return [float(pipe.train_step(batch)), pipe.eval_step(batch).loss]


def test_mini_batches_may_be_on_a_device() -> None:
    expected = losses("cpu", "cpu")
    for num_processes, device in ((1, TWO), (2, "cuda")):
        for found in run_emulated(losses, num_processes, device, "cuda:0"):
            assert found == pytest.approx(expected, rel=1e-12)


def predicted(folder: Path, use_cpu: bool) -> Any:
    model = plain_model(config_of("llama"), dtype=torch.float32)
    rows = [{"input_ids": [3 + i, 4, 5, 6], "labels": [3 + i, 4, 5, 6]} for i in range(5)]
    made = trainer(folder, model=model, train_dataset=rows, num_stages=2, use_cpu=use_cpu)
    return made.predict(rows).predictions


def test_predictions_are_the_cpu_s(tmp_path: Path) -> None:
    expected = predicted(tmp_path / "cpu", True)
    (found,) = run_emulated(predicted, 1, tmp_path / "cuda", False)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@on_emulated_cuda()
def test_times_are_those_of_each_device() -> None:
    config = config_of("llama")
    pipe = Pipeline(plain_model(config), 2, 2, device=TWO)
    times: list[ActionTime] = []
    pipe.train_step(padded_batch(config), times)
    assert len(times) == len(pipe.schedule(2).actions[0])
    assert all(one.end >= one.start for one in times)


@on_emulated_cuda()
def test_a_step_leaves_the_random_numbers_of_each_device_as_they_were() -> None:
    config = config_of("llama", dropout=0.3)
    pipe = Pipeline(plain_model(config), 2, 2, device=TWO)
    for index in range(3):
        torch.cuda.default_generators[index].manual_seed(index)
    expected = [torch.cuda.default_generators[index].get_state() for index in range(3)]
    pipe.train_step(padded_batch(config))
    for index, state in enumerate(expected):
        assert torch.equal(torch.cuda.default_generators[index].get_state(), state), f"cuda:{index}"
