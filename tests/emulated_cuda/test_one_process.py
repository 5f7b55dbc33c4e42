"""One process on one and on three emulated devices computes what it computes on the CPU."""

from __future__ import annotations

import pytest

from tests.emulated_cuda.comparing import assert_equals_the_cpu_s, config_of
from tests.emulated_cuda.processes import on_emulated_cuda

THREE = ("cuda:0", "cuda:1", "cuda:2")
#: schedule, recompute, partition
WAYS = (
    ("gpipe", "stage", "count"),
    ("gpipe_fused", "stage", (1, 2, -3)),
    ("1f1b", "none", (-4, 2, 2)),
    ("interleaved_1f1b", "block", "count"),
    ("naive", [1, "none", "stage"], "count"),
)


@pytest.mark.parametrize("devices", [("cuda:0",), THREE], ids=["1", "3"])
@pytest.mark.parametrize("family", ["llama", "marian", "t5"])
@on_emulated_cuda()
def test_schedules_recomputation_splits_and_ties(family: str, devices: tuple[str, ...]) -> None:
    from hf_gpipe.adapters import adapter_for

    config = config_of(family)
    num_layers = len(adapter_for(config).layers)
    for schedule, recompute, partition in WAYS:
        if not isinstance(partition, str):  # a negative number stands for the rest
            rest = num_layers - sum(size for size in partition if size > 0)
            partition = [size if size > 0 else rest for size in partition]
        assert_equals_the_cpu_s(
            config,
            list(devices),
            num_stages=3,
            num_micro_batches=2,
            schedule=schedule,
            recompute=recompute,
            partition=partition,
        )


@pytest.mark.parametrize("devices", [("cuda:0",), THREE], ids=["1", "3"])
@on_emulated_cuda()
def test_dropout_does_not_depend_on_the_device(devices: tuple[str, ...]) -> None:
    for family in ("llama", "marian"):
        config = config_of(family, dropout=0.3)
        for recompute in ("stage", "block"):
            assert_equals_the_cpu_s(
                config, list(devices), num_stages=3, num_micro_batches=2, schedule="1f1b", recompute=recompute
            )


@on_emulated_cuda()
def test_untied_weights_and_one_stage() -> None:
    assert_equals_the_cpu_s(config_of("llama", tied=False), ["cuda:1", "cuda:0"], num_stages=2, num_micro_batches=3)
    assert_equals_the_cpu_s(config_of("bart"), "cuda", num_stages=1, num_micro_batches=1, recompute="none")
