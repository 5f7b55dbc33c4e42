"""One process on one and on three emulated devices computes what it computes on the CPU, with ties and dropout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated_cuda.comparing import compare

THREE = ("cuda:0", "cuda:1", "cuda:2")
#: Ways to run three stages of each family.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": (
        {"schedule": "gpipe", "recompute": "stage", "partition": (1, 2, 3)},
        {"schedule": "1f1b", "recompute": [1, "none", "stage"]},
        {"schedule": "naive", "recompute": "block"},
    ),
    "marian": (
        {"schedule": "gpipe_fused", "recompute": "none", "partition": (1, 2, 4)},
        {"schedule": "interleaved_1f1b", "recompute": "stage"},
    ),
    "t5": (
        {"schedule": "1f1b", "recompute": "block", "partition": (5, 2, 2)},
        {"schedule": "gpipe_fused", "recompute": "stage", "partition": (1, 2, 6)},
    ),
}


def pipelines(family: str) -> list[dict[str, Any]]:
    return [{"num_stages": 3, "num_micro_batches": 2} | way for way in WAYS[family]]


@pytest.mark.parametrize("family", list(WAYS))
def test_on_three_devices(family: str) -> None:
    compare(1, family, THREE, pipelines(family), dropout=0.3)


def test_on_one_device() -> None:
    compare(1, "marian", ("cuda:1",), pipelines("marian"), dropout=0.3)


def test_untied_weights_and_rows_by_length_on_two_devices() -> None:
    way = {"num_stages": 2, "num_micro_batches": 2, "length_bucketing": True}
    compare(1, "llama", ("cuda:1", "cuda:0"), [way], tied=False)
