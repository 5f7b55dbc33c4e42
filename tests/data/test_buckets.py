"""Thirds of the languages by training pairs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.data.splits import Corpus
from hf_gpipe.tasks.translation.buckets import BUCKETS, resource_buckets, training_pairs
from hf_gpipe.tasks.translation.pairs import Pair


def test_the_paper_has_34_languages_in_each_third():
    counts = {f"l{rank:03}": 10**9 // rank for rank in range(1, 103)}
    buckets = resource_buckets(counts)
    assert [list(buckets.values()).count(name) for name in BUCKETS] == [34, 34, 34]
    assert buckets["l001"] == buckets["l034"] == "high"
    assert buckets["l035"] == buckets["l068"] == "middle"
    assert buckets["l069"] == buckets["l102"] == "low"


@pytest.mark.parametrize(
    ("languages", "expected"),
    [
        ("", []),
        ("a", ["high"]),
        ("ab", ["high", "low"]),
        ("abc", ["high", "middle", "low"]),
        ("abcd", ["high", "high", "middle", "low"]),
        ("abcde", ["high", "high", "middle", "middle", "low"]),
    ],
)
def test_few_languages_and_ties_by_code(languages, expected):
    backwards = dict.fromkeys(reversed(languages), 7)
    assert resource_buckets(backwards) == dict(zip(languages, expected, strict=True))


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 5)))
def test_no_language_of_a_lower_bucket_has_more_pairs(counts):
    buckets = resource_buckets(counts)
    assert buckets.keys() == counts.keys()
    ordered = sorted(counts, key=lambda language: BUCKETS.index(buckets[language]))
    for higher, lower in pairwise(ordered):
        if buckets[higher] != buckets[lower]:
            assert counts[higher] >= counts[lower]
    if len(counts) > 2:
        sizes = [list(buckets.values()).count(name) for name in BUCKETS]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[2] <= 1


def test_training_pairs_of_a_corpus_and_of_a_stream():
    pairs = [Pair("a", "b", language, "b") for language in ("fr", "de", "fr")]
    corpus = Corpus(pairs, [], [], ["de", "fr", "ru"], [])
    assert list(training_pairs(corpus).items()) == [("de", 1), ("fr", 2), ("ru", 0)]
    stream = SimpleNamespace(train=SimpleNamespace(counts={"de": 10**9}), languages=["de", "fr"])
    assert training_pairs(stream) == {"de": 10**9}, "what a stream does not know is not made up"
