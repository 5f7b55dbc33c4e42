"""Faults in the CUDA branches: each makes a step on the emulated devices fail, or give other numbers."""

from __future__ import annotations

import os

import pytest

from hf_gpipe.runtime import channel, micro_batch
from hf_gpipe.schedule import messages
from tests.emulated_cuda.comparing import assert_equals_the_cpu_s, config_of
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import EmulatedError, run_emulated


def step(blocks: bool) -> None:
    if blocks:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    for schedule in ("gpipe", "1f1b"):
        assert_equals_the_cpu_s(
            config_of("llama"), "cuda", num_stages=2, num_micro_batches=4, schedule=schedule, recompute="stage"
        )


def a_cpu_tensor_in_a_forward() -> None:
    mutate(micro_batch._on_device, "tensor.to(device, non_blocking=True)", "tensor")
    step(False)


def a_buffer_on_the_cpu() -> None:
    mutate(channel.RemoteChannel, "device=self._device", 'device="cpu"')
    step(False)


def a_buffer_on_another_device() -> None:
    mutate(channel.RemoteChannel, "device=self._device", 'device="cuda:5"')
    step(False)


def a_message_that_is_not_waited_for() -> None:
    mutate(channel.RemoteChannel, "            work.wait()\n", "            pass\n")
    step(False)


def a_receive_that_is_started_early() -> None:
    mutate(messages.messages, "passed[receiver])", "0)")
    step(True)


@pytest.mark.parametrize(
    ("mutant", "num_processes", "error"),
    [
        (a_cpu_tensor_in_a_forward, 1, "Expected all tensors to be on the same device"),
        (a_buffer_on_the_cpu, 2, "No backend type associated with device type cpu|must be CUDA"),
        (a_buffer_on_another_device, 2, "the tensor on cuda:5"),
        (a_message_that_is_not_waited_for, 2, "nan|off by|on the CPU"),
        (a_receive_that_is_started_early, 2, "had not ended"),
    ],
)
def test_a_fault_is_noticed(mutant: object, num_processes: int, error: str) -> None:
    with pytest.raises(EmulatedError, match=error):
        run_emulated(mutant, num_processes, timeout=15)  # type: ignore[arg-type]


def test_without_a_fault_the_same_step_passes() -> None:
    run_emulated(step, 2, True)
