"""Which examples make up which mini-batch: a pure function of the seed and the epoch.

Every process and every resumed run can compute the plan for itself and finds the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.data.deterministic import stable_random

# Rows are sorted by length within pools of this many mini-batches: enough that neighbours are about equally long, few
# enough that an epoch's mini-batches are made of other rows than the last one's.
POOL_BATCHES = 50


def shuffled_batches(num_examples: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The indices 0..num_examples-1 in random order, cut into mini-batches; the last one may be smaller."""
    order = list(range(num_examples))
    stable_random("batches", seed, epoch).shuffle(order)
    return _cut(order, batch_size)


def length_bucketed_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Mini-batches of rows of similar length, in random order; every index exactly once, one batch may be smaller.

    `lengths` are tokens. Inside a mini-batch the rows are sorted by length, so that micro-batches, which are
    consecutive rows of it, hold rows of similar length as well and need little padding.
    """
    rng = stable_random("batches", seed, epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches = []
    for pool in _cut(order, batch_size * POOL_BATCHES):
        # A stable sort: equally long rows stay shuffled.
        batches += _cut(sorted(pool, key=lengths.__getitem__), batch_size)
    rng.shuffle(batches)
    return batches


def _cut(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]
