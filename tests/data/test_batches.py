"""Plans of mini-batches: complete, repeatable, and short of padding."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data import length_bucketed_batches, shuffled_batches
from hf_gpipe.data.batches import distinct_batches, num_token_batches, token_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=300)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 3)


def is_complete(batches: list[list[int]], count: int, size: int) -> bool:
    uneven = [len(batch) for batch in batches if len(batch) != size]
    return sorted(index for batch in batches for index in batch) == list(range(count)) and uneven == (
        [count % size] if count % size else []
    )


@settings(max_examples=60, deadline=None)
@given(LENGTHS, SIZES, SEEDS, SEEDS)
def test_an_epoch_holds_every_example_once(lengths, size, seed, epoch):
    assert is_complete(length_bucketed_batches(lengths, size, seed, epoch), len(lengths), size)
    assert is_complete(shuffled_batches(len(lengths), size, seed, epoch), len(lengths), size)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.frozensets(st.integers(0, 30), min_size=1, max_size=3), min_size=1, max_size=60), SIZES, SEEDS, SEEDS
)
def test_no_two_rows_of_a_mini_batch_share_a_key(keys, size, seed, epoch):
    count = -(-len(keys) // size)
    batches = distinct_batches(keys, size, count, seed, epoch)
    rows = [row for batch in batches for row in batch]
    assert len(batches) == count
    assert all(0 < len(batch) <= size for batch in batches)
    assert len(rows) == len({*rows})
    assert all(sum(map(len, own)) == len(frozenset().union(*own)) for own in ([keys[r] for r in b] for b in batches))
    for row in {*range(len(keys))} - {*rows}:  # what is left out fits nowhere
        assert all(len(batch) == size or any(keys[row] & keys[other] for other in batch) for batch in batches)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, SIZES, SEEDS, SEEDS)
def test_rows_of_a_mini_batch_are_sorted_by_length(lengths, size, seed, epoch):
    for batch in length_bucketed_batches(lengths, size, seed, epoch):
        assert [lengths[index] for index in batch] == sorted(lengths[index] for index in batch)


def test_plans_are_functions_of_seed_and_epoch():
    lengths = [random.Random(0).randrange(100) for _ in range(500)]
    plan = length_bucketed_batches(lengths, 16, seed=1, epoch=2)
    assert plan == length_bucketed_batches(lengths, 16, seed=1, epoch=2)
    assert plan != length_bucketed_batches(lengths, 16, seed=1, epoch=3)
    assert plan != length_bucketed_batches(lengths, 16, seed=2, epoch=2)
    assert shuffled_batches(500, 16, 1, 2) == shuffled_batches(500, 16, 1, 2) != shuffled_batches(500, 16, 1, 3)


def test_buckets_save_padding_and_change_every_epoch():
    generator = random.Random(0)
    lengths = [generator.randrange(1, 200) for _ in range(10_000)]

    def padding(batches: list[list[int]]) -> int:
        return sum(max(lengths[i] for i in batch) - lengths[j] for batch in batches for j in batch)

    bucketed = length_bucketed_batches(lengths, 32, seed=0, epoch=0)
    assert padding(bucketed) < padding(shuffled_batches(10_000, 32, seed=0, epoch=0)) / 20
    other = {frozenset(batch) for batch in length_bucketed_batches(lengths, 32, seed=0, epoch=1)}
    assert not other & {frozenset(batch) for batch in bucketed}


def test_batches_of_one_length_do_not_follow_one_another():
    lengths = list(range(1000))
    first = [lengths[batch[0]] for batch in length_bucketed_batches(lengths, 10, seed=0, epoch=0)]
    rises = sum(left < right for left, right in pairwise(first))
    assert rises == pytest.approx(50, abs=15)


# ---------------------------------------------------------------------- by tokens


TOKENS = st.lists(st.integers(0, 60), min_size=1, max_size=200)


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.integers(1, 500), SEEDS, SEEDS, st.sampled_from(["shuffled", "by length", "in order"]))
def test_mini_batches_of_tokens_share_an_epoch_evenly(tokens, batch_tokens, seed, epoch, how):
    count = num_token_batches(tokens, batch_tokens)
    lengths = [2 * number for number in tokens] if how == "by length" else None
    batches = token_batches(tokens, count, seed, epoch, lengths, shuffled=how != "in order")
    assert batches == token_batches(tokens, count, seed, epoch, lengths, shuffled=how != "in order")
    assert len(batches) == count >= 1
    assert all(batches)
    rows = [row for batch in batches for row in batch]
    assert sorted(rows) == list(range(len(tokens)))
    if how == "in order":
        assert rows == sorted(rows)
    for batch in batches:
        assert abs(sum(tokens[row] for row in batch) - sum(tokens) / count) <= max(tokens) + 1e-6
        assert how != "by length" or [lengths[row] for row in batch] == sorted(lengths[row] for row in batch)


def test_the_number_of_mini_batches_is_the_rounded_ratio():
    assert num_token_batches([10] * 100, 100) == 10
    assert num_token_batches([10] * 104, 100) == 10
    assert num_token_batches([10] * 106, 100) == 11
    assert num_token_batches([10] * 3, 1) == 3, "a mini-batch has at least a row"
    assert num_token_batches([10] * 3, 10**6) == 1
    assert num_token_batches([], 5) == 0
    assert token_batches([], 0, 0, 0) == []


def test_buckets_of_tokens_save_padding_and_change_every_epoch():
    generator = random.Random(0)
    tokens = [generator.randrange(1, 200) for _ in range(10_000)]
    count = num_token_batches(tokens, 3200)

    def padding(batches: list[list[int]]) -> int:
        return sum(max(tokens[i] for i in batch) - tokens[j] for batch in batches for j in batch)

    bucketed = token_batches(tokens, count, 0, 0, tokens)
    assert padding(bucketed) < padding(token_batches(tokens, count, 0, 0)) / 20
    other = {frozenset(batch) for batch in token_batches(tokens, count, 0, 1, tokens)}
    assert not other & {frozenset(batch) for batch in bucketed}
