"""Which examples make up which mini-batch: a pure function of the seed and the epoch.

Every process and every resumed run can compute the plan for itself and finds the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

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


def num_token_batches(tokens: Sequence[int], batch_tokens: int) -> int:
    """How many mini-batches of about `batch_tokens` the rows make; `tokens` are each row's."""
    return max(1, min(len(tokens), round(sum(tokens) / batch_tokens))) if tokens else 0


def token_batches(
    tokens: Sequence[int],
    num_batches: int,
    seed: int,
    epoch: int,
    lengths: Sequence[int] | None = None,
    *,
    shuffled: bool = True,
) -> list[list[int]]:
    """The indices of `tokens`, every one once, in mini-batches of about equal sums of tokens.

    No sum is further from the mean than the tokens of the longest row.

    Args:
        tokens: of each row, what the sums count: target tokens.
        num_batches: at most the number of rows, so that each has at least one.
        seed: of the order.
        epoch: for another order in each.
        lengths: of each row; rows of similar length then share a mini-batch, sorted, as in `length_bucketed_batches`.
        shuffled: False: rows keep their order; not with `lengths`.
    """
    rng = stable_random("batches", seed, epoch)
    order = list(range(len(tokens)))
    if not shuffled:
        return cut_evenly(order, tokens, num_batches)
    rng.shuffle(order)
    if lengths is None:
        return cut_evenly(order, tokens, num_batches)
    num_pools = -(-num_batches // POOL_BATCHES)
    ordered = []
    for number, pool in enumerate(cut_evenly(order, [1] * len(tokens), num_pools)):
        # Up and down in turn, for a mini-batch may lie across the border of two pools.
        ordered += sorted(pool, key=lengths.__getitem__, reverse=number % 2 == 1)
    batches = [sorted(batch, key=lengths.__getitem__) for batch in cut_evenly(ordered, tokens, num_batches)]
    rng.shuffle(batches)
    return batches


def cut_evenly(order: Sequence[int], tokens: Sequence[int], count: int) -> list[list[int]]:
    """`order` in `count` runs, none empty, whose sums of tokens differ from their mean by the longest row at most.

    Args:
        order: indices of rows, at least `count`.
        tokens: of each row, by index.
        count: of the runs; 0 only where there are no rows.
    """
    sums = [0, *accumulate(tokens[row] for row in order)]
    cuts = [0]
    for number in range(1, count):
        # The border nearest to the ideal one, and a row for each run before and after it.
        ideal = number * sums[-1] / count
        after = bisect_left(sums, ideal)
        nearest = after - 1 if after and ideal - sums[after - 1] <= sums[after] - ideal else after
        cuts.append(min(max(nearest, cuts[-1] + 1), len(order) - count + number))
    return [list(order[start:end]) for start, end in zip(cuts, [*cuts[1:], len(order)], strict=True) if start < end]


def _cut(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]
