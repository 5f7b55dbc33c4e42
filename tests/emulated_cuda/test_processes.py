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


def run_all_schedules(num_processes: int) -> None:
    """As with CUDA_LAUNCH_BLOCKING=1, and for a moment whenever a kernel is loaded or memory is freed."""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    config = config_of("marian", encoder_layers=4)
    for schedule in ("gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "naive"):
        num_stages = 2 * num_processes if schedule == "interleaved_1f1b" else num_processes
        assert_equals_the_cpu_s(
            config, "cuda", num_stages=num_stages, num_micro_batches=4, schedule=schedule, recompute="stage"
        )


@on_emulated_cuda(2)
def test_every_schedule_runs_when_each_message_blocks_one_of_two_processes() -> None:
    run_all_schedules(2)


@on_emulated_cuda(4)
def test_every_schedule_runs_when_each_message_blocks_one_of_four_processes() -> None:
    run_all_schedules(4)


@on_emulated_cuda(2)
def test_replicas_of_one_stage() -> None:
    for family in ("llama", "marian"):
        assert_equals_the_cpu_s(config_of(family), "cuda", num_stages=1, num_micro_batches=3, replicas=2)


@on_emulated_cuda(4)
def test_replicas_of_two_stages() -> None:
    """With blocking messages too: then the sum of one stage's gradients ends before the next action starts."""
    for blocking in ("0", "1"):
        os.environ["CUDA_LAUNCH_BLOCKING"] = blocking
        for tied in (True, False):
            assert_equals_the_cpu_s(
                config_of("llama", tied=tied),
                "cuda",
                num_stages=2,
                num_micro_batches=4,
                schedule="1f1b",
                recompute="stage",
                replicas=2,
            )
