"""The examples of each mini-batch: a pure function of the seed and the epoch.

So every process and every resumed run computes the same mini-batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler

from hf_gpipe.data.deterministic import stable_random

# Examples are sorted by length within pools of this many mini-batches: enough that neighbours are about equally long,
# few enough that mini-batches differ from epoch to epoch.
POOL_BATCHES = 50


def shuffled_batches(num_examples: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The indices 0..num_examples-1 in random order, cut into mini-batches; the last one may be smaller."""
    order = list(range(num_examples))
    stable_random("batches", seed, epoch).shuffle(order)
    return _cut(order, batch_size)


def length_bucketed_batches(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Mini-batches of examples of similar length, in random order; every index exactly once, one batch may be smaller.

    `lengths` are tokens. Inside a mini-batch the examples are sorted by length, so that micro-batches, which are
    consecutive rows of it, have similar lengths as well and need little padding.
    """
    rng = stable_random("batches", seed, epoch)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    keys, batches = np.asarray(lengths, dtype=np.int64), list[list[int]]()
    for pool in _cut(order, batch_size * POOL_BATCHES):
        batches += _cut(_sorted(pool, keys), batch_size)
    rng.shuffle(batches)
    return batches


def distinct_batches(
    keys: Sequence[Collection[int]], batch_size: int, num_batches: int, seed: int, epoch: int
) -> list[list[int]]:
    """Mini-batches of rows in random order, no two of which share a key; each has at most `batch_size` rows.

    A row goes into the first mini-batch that has room and none of its keys. A row that fits into none, since one of its
    keys is in most rows, is left out of this epoch.

    Args:
        keys: the keys of each row, such as its texts.
        batch_size: rows of a mini-batch.
        num_batches: at most as many as the rows fill.
        seed: seed of the order.
        epoch: each epoch has another order.
    """
    order = list(range(len(keys)))
    stable_random("batches", seed, epoch).shuffle(order)
    batches, present = [list[int]() for _ in range(num_batches)], [set[int]() for _ in range(num_batches)]
    first = 0
    for row in order:
        while first < num_batches and len(batches[first]) == batch_size:
            first += 1
        for number in range(first, num_batches):
            if len(batches[number]) < batch_size and present[number].isdisjoint(keys[row]):
                batches[number].append(row)
                present[number].update(keys[row])
                break
    return batches


def drawn_batches(num_examples: int, batch_size: int, generator: torch.Generator, *, drop_last: bool) -> BatchSampler:
    """`shuffled_batches` as torch's own samplers draw them, once the first is asked for, by a shared generator."""
    return BatchSampler(RandomSampler(range(num_examples), generator=generator), batch_size, drop_last)


def mixed_batches(
    of_datasets: Sequence[Iterable[list[int]]],
    counts: Sequence[int],
    starts: Sequence[int],
    generator: torch.Generator,
    *,
    in_turn: bool,
) -> Iterator[list[int]]:
    """The mini-batches of several datasets, each of rows of one of them, in the order of sentence-transformers.

    Args:
        of_datasets: the mini-batches of each dataset, of the indices of its rows.
        counts: the number of mini-batches of each.
        starts: what is added to the indices of each dataset.
        generator: draws the order, before the mini-batches of any dataset are asked for.
        in_turn: whether the datasets take turns until one has no other mini-batch; False: in proportion to the counts.
    """
    batches = [iter(own) for own in of_datasets]
    if in_turn:
        for turn in zip(*batches, strict=False):
            for start, batch in zip(starts, turn, strict=False):
                yield [start + row for row in batch]
        return
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    for number in SubsetRandomSampler(owners, generator=generator):
        yield [starts[number] + row for row in next(batches[number])]


def num_token_batches(tokens: Sequence[int], size: int) -> int:
    """The number of mini-batches of about so many tokens; `tokens` are those of each example."""
    return max(1, min(len(tokens), round(int(np.sum(tokens)) / size))) if len(tokens) else 0


def token_batches(
    tokens: Sequence[int],
    num_batches: int,
    seed: int,
    epoch: int,
    lengths: Sequence[int] | None = None,
    *,
    shuffled: bool = True,
) -> list[list[int]]:
    """The indices of `tokens`, each once, in mini-batches of about equal sums of tokens.

    No sum differs from the mean by more than the tokens of the longest example.

    Args:
        tokens: the number of target tokens of each example.
        num_batches: at most the number of examples, so that each mini-batch has at least one.
        seed: seed of the order.
        epoch: each epoch has another order.
        lengths: the length of each example; if given, examples of similar length share a mini-batch, sorted, as in
            `length_bucketed_batches`.
        shuffled: False: examples keep their order; not with `lengths`.
    """
    rng = stable_random("batches", seed, epoch)
    order = list(range(len(tokens)))
    if not shuffled:
        return cut_evenly(order, tokens, num_batches)
    rng.shuffle(order)
    if lengths is None:
        return cut_evenly(order, tokens, num_batches)
    num_pools = -(-num_batches // POOL_BATCHES)
    keys, ordered = np.asarray(lengths, dtype=np.int64), list[int]()
    for number, pool in enumerate(cut_evenly(order, [1] * len(tokens), num_pools)):
        # Up and down in turn, for a mini-batch may lie across the border of two pools.
        ordered += _sorted(pool, keys if number % 2 == 0 else -keys)
    batches = [_sorted(batch, keys) for batch in cut_evenly(ordered, tokens, num_batches)]
    rng.shuffle(batches)
    return batches


def cut_evenly(order: Sequence[int], tokens: Sequence[int], count: int) -> list[list[int]]:
    """Cut `order` into `count` non-empty runs whose sums of tokens differ from the mean by at most the longest example.

    Args:
        order: indices of examples, at least `count`.
        tokens: the tokens of each example, by index.
        count: the number of runs; 0 only if there are no examples.
    """
    of_order = np.asarray(tokens, dtype=np.int64)[np.asarray(order, dtype=np.int64)]
    sums: list[int] = [0, *np.cumsum(of_order).tolist()]
    cuts = [0]
    for number in range(1, count):
        # The border nearest to the ideal one that leaves an example for each run before and after it.
        ideal = number * sums[-1] / count
        after = bisect_left(sums, ideal)
        nearest = after - 1 if after and ideal - sums[after - 1] <= sums[after] - ideal else after
        cuts.append(min(max(nearest, cuts[-1] + 1), len(order) - count + number))
    return [list(order[start:end]) for start, end in zip(cuts, [*cuts[1:], len(order)], strict=True) if start < end]


def _sorted(rows: list[int], keys: np.ndarray) -> list[int]:
    """The rows by their keys; those with equal keys stay shuffled."""
    ordered: list[int] = np.asarray(rows)[np.argsort(keys[rows], kind="stable")].tolist()
    return ordered


def _cut(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]
