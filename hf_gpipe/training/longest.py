"""The greatest length of mini-batches, which the planner must know before the training begins."""

from __future__ import annotations

import math
from statistics import mean, pstdev
from typing import Any

from hf_gpipe.adapters.text_entries import has_ids, token_ids
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.training.pools import has_index, target_tokens

#: The number of rows that are looked at, evenly over the dataset: reading all of a large dataset would take minutes.
_SAMPLE = 1000


def longest_mini_batch(
    dataset: Any, size: BatchSize, *, by_length: bool = False, packing: bool = False
) -> Workload | None:
    """A mini-batch whose rows are all as long as the longest row drawn, or padded to it; packed, a large one.

    Args:
        dataset: the training rows before they are collated. A stream of rows may have the attribute `longest`, the most
            ids and labels of a row.
        size: the size of a mini-batch.
        by_length: whether rows of similar length share a mini-batch.
        packing: whether the rows of a mini-batch are packed.

    Returns:
        The shape of the mini-batch; None where the rows have no `input_ids`, or their number is not known.
    """
    if not has_index(dataset):
        if (longest := getattr(dataset, "longest", None)) is None:
            return None
        rows: list[Any] = []
        sources, targets = ([length] for length in longest)
    elif len(dataset) == 0:
        return None
    else:
        rows = [dataset[index] for index in range(0, len(dataset), -(-len(dataset) // _SAMPLE))]
        if not all(map(has_ids, rows)):
            return None
        sources = [len(token_ids(row)) for row in rows]
        # A collator of language modelling makes the labels from the ids.
        targets = [len(row["labels"] if hasattr(row.get("labels"), "__len__") else token_ids(row)) for row in rows]
    if (num_rows := size.known_rows) is None:
        counts = [target_tokens(row) for row in rows] or targets
        # An unsorted mini-batch has as many rows as rows of mean length fill it, and pads them to its longest row.
        typical = max(counts) if by_length else sum(counts) // len(counts)
        num_rows = size.rows_of(max(1, typical))
    if packing:

        def large_and_longest(lengths: list[int]) -> tuple[int, int]:
            longest = max(*lengths, 1)
            # Rows are drawn at random: their sum almost never exceeds its mean by four standard deviations.
            large = longest if by_length else mean(lengths) + 4 * pstdev(lengths) / math.sqrt(num_rows)
            return max(1, min(longest, math.ceil(large))), longest

        return Workload.packed(num_rows, large_and_longest(sources), large_and_longest(targets))
    return Workload(num_rows, max(*sources, 1), max(*targets, 1))
