from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition import partition


@given(st.integers(1, 200), st.data())
def test_by_count_holds_every_layer_once_and_in_order(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    stages = partition(num_layers, num_stages)
    assert len(stages) == num_stages
    assert list(chain.from_iterable(stages)) == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert all(one >= following for one, following in pairwise(sizes))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_explicit_counts_are_taken_as_they_are(counts: list[int]) -> None:
    stages = partition(sum(counts), len(counts), counts)
    assert [len(stage) for stage in stages] == counts
    assert list(chain.from_iterable(stages)) == list(range(sum(counts)))
    assert partition(sum(counts), len(counts), tuple(counts)) == stages


def test_the_longer_stages_come_first() -> None:
    assert partition(7, 3) == (range(0, 3), range(3, 5), range(5, 7))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "strategy", "message"),
    [
        (4, 0, "count", "num_stages is 0; use at least 1"),
        (4, 5, "count", "num_stages is 5, but the model has 4 layers .* at most 4"),
        (4, 5, [1, 1, 1, 1, 1], "num_stages is 5, but the model has 4 layers"),
        (4, 2, "cuont", ".*is unknown; use one of count, parameters.*did you mean .count.*"),
        (4, 2, "flops", "partition .flops. needs the cost of each layer.*"),
        (4, 2, [4], "[4] has 1 entries and num_stages is 2"),
        (4, 2, [2, 3], "[2, 3] adds up to 5 layers, but the model has 4"),
        (4, 2, [4, 0], "gives stage 1 0 layers"),
        (4, 2, [5, -1], "gives stage 1 -1 layers"),
        (4, 2, [2, 2.0], "gives stage 1 2.0 layers"),
        (4, 2, [3, True], "gives stage 1 True layers"),
    ],
)
def test_impossible_partitions(num_layers: int, num_stages: int, strategy: str | Sequence[int], message: str) -> None:
    pattern = message if ".*" in message else re.escape(message)
    with pytest.raises(PartitionError, match=pattern):
        partition(num_layers, num_stages, strategy)
