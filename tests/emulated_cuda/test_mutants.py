"""Faults in the CUDA branches: each makes a step on the emulated devices fail, or give other numbers."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hf_gpipe.runtime import channel, micro_batch
from hf_gpipe.schedule import messages
from tests.emulated_cuda.comparing import assert_same, config_of, outcome
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import EmulatedError, run_emulated


def step(mutant: Callable[[], None], schedule: str, blocks: bool) -> None:
    """Two steps on the emulated devices after a change of the package, compared with those on the CPU before it."""
    of_pipeline = {"num_stages": 2, "num_micro_batches": 4, "schedule": schedule, "recompute": "stage"}
    expected = outcome(config_of("llama"), "cpu", **of_pipeline)
    if blocks:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    mutant()
    assert_same(outcome(config_of("llama"), "cuda", **of_pipeline), expected)


def a_cpu_tensor_in_a_forward() -> None:
    mutate(micro_batch._on_device, "tensor.to(device, non_blocking=True)", "tensor")


def a_buffer_on_the_cpu() -> None:
    mutate(channel.RemoteChannel, "device=self._device", 'device="cpu"')


def a_buffer_on_another_device() -> None:
    mutate(channel.RemoteChannel, "device=self._device", 'device="cuda:5"')


def a_message_that_is_not_waited_for() -> None:
    mutate(channel.RemoteChannel, "            work.wait()\n", "            pass\n")


def a_receive_that_is_started_early() -> None:
    mutate(messages.messages, "passed[receiver])", "max(0, passed[receiver] - 2))")


def no_fault() -> None:
    """The same steps as with the faults must pass."""


@pytest.mark.parametrize(
    ("mutant", "num_processes", "error"),
    [
        (a_cpu_tensor_in_a_forward, 1, "Expected all tensors to be on the same device"),
        (a_buffer_on_the_cpu, 2, "No backend type associated with device type cpu|must be CUDA"),
        (a_buffer_on_another_device, 2, "the tensor on cuda:5"),
        (a_message_that_is_not_waited_for, 2, "is nan|is off by|and on the CPU|freed before its receive had ended"),
    ],
)
def test_a_fault_is_noticed(mutant: Callable[[], None], num_processes: int, error: str) -> None:
    with pytest.raises(EmulatedError, match=error):
        run_emulated(step, num_processes, mutant, "gpipe", False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_receive_that_is_started_early_is_noticed(schedule: str) -> None:
    both_receive = r"(?s)had not ended.*process 0:.* in expect\n.*process 1:.* in expect\n"
    with pytest.raises(EmulatedError, match=both_receive):
        run_emulated(step, 2, a_receive_that_is_started_early, schedule, True, timeout=15)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_without_a_fault_the_same_steps_pass(schedule: str) -> None:
    run_emulated(step, 2, no_fault, schedule, True)
