"""Faults in the CUDA branches: each makes a step on the emulated devices fail, or give other numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from hf_gpipe.runtime import channel, micro_batch
from hf_gpipe.schedule import messages
from scripts.cuda_mutants import MUTANTS, ROOT, misfits
from tests.emulated_cuda.comparing import Outcome, assert_same, on_the_cpu, outcome
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import EmulatedError, run_emulated
from tests.emulated_cuda.test_processes import blocking_way

CONFIG = {"encoder_layers": 4}


def step(mutant: Callable[[], None], way: dict[str, Any], blocks: bool, expected: Outcome) -> None:
    """Steps on the emulated devices after a change of the package. Without it they pass (test_processes.py)."""
    if blocks:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    mutant()
    assert_same(outcome(config_of("marian", **CONFIG), "cuda", **way), expected)


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


@pytest.mark.parametrize(
    ("mutant", "num_processes", "error"),
    [
        (a_cpu_tensor_in_a_forward, 1, "Expected all tensors to be on the same device"),
        (a_buffer_on_the_cpu, 2, "No backend type associated with device type cpu|must be CUDA"),
        (a_buffer_on_another_device, 2, "the tensor on cuda:5"),
        (a_message_that_is_not_waited_for, 2, "is nan|is off by|and on the CPU|freed before|differ|had not ended"),
    ],
)
def test_a_fault_is_noticed(mutant: Callable[[], None], num_processes: int, error: str) -> None:
    expected = on_the_cpu("marian", 4, **CONFIG)
    with pytest.raises(EmulatedError, match=error):
        run_emulated(step, num_processes, mutant, blocking_way(2, "gpipe"), False, expected, stall=10)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_receive_that_is_started_early_is_noticed(schedule: str) -> None:
    both_receive = r"(?s)had not ended.*process 0:.* in expect\n.*process 1:.* in expect\n"
    expected = on_the_cpu("marian", 4, **CONFIG)
    with pytest.raises(EmulatedError, match=both_receive):
        run_emulated(step, 2, a_receive_that_is_started_early, blocking_way(2, schedule), True, expected, stall=3)


def test_the_mutants_of_the_script_fit_the_package() -> None:
    """`python scripts/cuda_mutants.py` runs the tests against each, which takes too long here."""
    assert misfits(ROOT, MUTANTS) == []
