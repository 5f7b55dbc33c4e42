"""Several processes on emulated devices, with a stand-in for NCCL, compute what they compute on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated_cuda.comparing import compare

SCHEDULES = ("gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "naive", "zb_h1", "zb_v")
#: Those with two stages in each process.
WITH_TWO = ("interleaved_1f1b", "zb_v")


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_schedules_and_ties_in_two_processes(family: str) -> None:
    ways = [
        {"schedule": "gpipe", "num_stages": 3, "recompute": "stage", "num_micro_batches": 4},
        {"schedule": "interleaved_1f1b", "num_stages": 4, "recompute": "block", "num_micro_batches": 4},
    ]
    compare(2, family, "cuda", ways, dropout=0.2)


def test_two_processes_on_two_devices_each() -> None:
    """This split gives a process copies of one tied parameter on both devices, and of another on one of them."""
    way = {"num_stages": 4, "num_micro_batches": 2, "schedule": "1f1b", "recompute": "stage", "partition": (2, 2, 2, 7)}
    compare(2, "t5", [f"cuda:{index}" for index in range(4)], [way], num_layers=4)


@pytest.mark.parametrize(("num_processes", "schedules"), [(2, SCHEDULES), (4, ("gpipe_fused", "1f1b", "zb_v"))])
def test_schedules_run_when_each_message_blocks_its_process(num_processes: int, schedules: tuple[str, ...]) -> None:
    ways = [blocking_way(num_processes, schedule) for schedule in schedules]
    compare(num_processes, "marian", "cuda", ways, blocks=True, encoder_layers=4)


def blocking_way(num_processes: int, schedule: str) -> dict[str, Any]:
    num_stages = 2 * num_processes if schedule in WITH_TWO else num_processes
    return {"num_stages": num_stages, "num_micro_batches": 4, "schedule": schedule, "recompute": "stage"}


@pytest.mark.parametrize(("family", "blocks"), [("llama", False), ("marian", True)])
def test_two_stages_whose_layers_are_divided(family: str, blocks: bool) -> None:
    way = {"num_stages": 2, "num_micro_batches": 4, "tensor_parallel": 2}
    ways: list[dict[str, Any]] = [
        {"schedule": "1f1b", "recompute": "block"},
        {"schedule": "zb_h1", "recompute": "stage"},
    ]
    compare(4, family, "cuda", [way | own for own in ways], blocks=blocks)


def test_replicas_of_one_stage() -> None:
    compare(2, "marian", "cuda", [{"num_stages": 1, "num_micro_batches": 3, "replicas": 2}])


REPLICAS = {"num_stages": 2, "num_micro_batches": 4, "schedule": "1f1b", "recompute": "stage", "replicas": 2}


def test_replicas_of_two_stages_and_shards_of_their_optimizer() -> None:
    compare(4, "llama", "cuda", [REPLICAS, REPLICAS | {"schedule": "gpipe", "zero": 1}])


def test_replicas_of_two_stages_when_each_message_blocks_its_process() -> None:
    """Then the sum of one stage's gradients ends before the next action starts."""
    compare(4, "llama", "cuda", [REPLICAS | {"zero": 1}], blocks=True, tied=False)
