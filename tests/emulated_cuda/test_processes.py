"""Several processes on emulated devices, with a stand-in for NCCL, compute what they compute on the CPU."""

from __future__ import annotations

import os

import pytest

from hf_gpipe.adapters import adapter_for
from tests.emulated_cuda.comparing import assert_equals_the_cpu_s, config_of
from tests.emulated_cuda.processes import on_emulated_cuda


@pytest.mark.parametrize("family", ["llama", "marian"])
@on_emulated_cuda(2)
def test_schedules_and_ties_in_two_processes(family: str) -> None:
    config = config_of(family, dropout=0.2)
    for schedule, num_stages, recompute in (
        ("gpipe", 3, "stage"),
        ("1f1b", 2, "none"),
        ("interleaved_1f1b", 4, "block"),
    ):
        assert_equals_the_cpu_s(
            config, "cuda", num_stages=num_stages, num_micro_batches=4, schedule=schedule, recompute=recompute
        )


@on_emulated_cuda(4)
def test_four_processes() -> None:
    assert_equals_the_cpu_s(
        config_of("marian"), "cuda", num_stages=4, num_micro_batches=5, schedule="gpipe_fused", recompute="stage"
    )


@on_emulated_cuda(2)
def test_two_processes_on_two_devices_each() -> None:
    """This split gives a process copies of one tied parameter on both devices, and of another on one of them."""
    config = config_of("t5", num_layers=4)
    sizes = [2, 2, 2, len(adapter_for(config).layers) - 6]
    devices = [f"cuda:{index}" for index in range(4)]
    assert_equals_the_cpu_s(
        config, devices, num_stages=4, num_micro_batches=2, schedule="1f1b", recompute="stage", partition=sizes
    )


@on_emulated_cuda(4)
def test_every_schedule_runs_when_each_message_blocks_its_process() -> None:
    """As with CUDA_LAUNCH_BLOCKING=1, and for a moment whenever a kernel is loaded or memory is freed."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    for schedule, num_stages in (("gpipe", 4), ("gpipe_fused", 4), ("1f1b", 4), ("interleaved_1f1b", 8), ("naive", 4)):
        config = config_of("marian")
        assert_equals_the_cpu_s(
            config, "cuda", num_stages=num_stages, num_micro_batches=4, schedule=schedule, recompute="stage"
        )
