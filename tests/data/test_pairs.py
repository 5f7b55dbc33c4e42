"""Splits depend on the split key alone, and nothing is in two of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data import splits
from hf_gpipe.data.deterministic import stable_fraction, stable_random
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.pairs import Pair, tagged, texts_of


def pairs_with_keys(keys: list[str]) -> list[Pair]:
    return [Pair(f"source {index}", f"target {index}", "de", key) for index, key in enumerate(keys)]


def split(keys: list[str], validation_fraction: float = 0.2, test_fraction: float = 0.2):
    data = DataSection(kind="jsonl", path="x", validation_fraction=validation_fraction, test_fraction=test_fraction)
    parts = splits.split_beside((), pairs_with_keys(keys), data, lambda pair: pair.split_key, "pairs")
    return Corpus(**parts, languages=["de"], texts_of=texts_of)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=60))
def test_every_pair_is_in_one_split_and_equal_keys_stay_together(keys):
    keys = ["always trained on", *keys]
    corpus = split(keys)
    assert sorted([*corpus.train, *corpus.validation, *corpus.test], key=lambda pair: pair.source) == sorted(
        pairs_with_keys(keys), key=lambda pair: pair.source
    )
    of_split = [{pair.split_key for pair in part} for part in (corpus.train, corpus.validation, corpus.test)]
    assert not of_split[0] & of_split[1]
    assert not of_split[0] & of_split[2]
    assert not of_split[1] & of_split[2]


def test_fractions_are_met_on_average():
    corpus = split([str(number) for number in range(4000)], validation_fraction=0.1, test_fraction=0.3)
    assert len(corpus.validation) == pytest.approx(400, rel=0.15)
    assert len(corpus.test) == pytest.approx(1200, rel=0.15)


def test_a_key_keeps_its_split_when_the_corpus_grows():
    small, large = split([str(n) for n in range(100)]), split([str(n) for n in range(1000)])
    assert {pair.split_key for pair in small.test} <= {pair.split_key for pair in large.test}


def test_hashes_are_the_same_on_every_machine():
    assert stable_fraction("in 3 days") == 0.8338882275633885
    assert stable_random("cldr", 0, "de").randrange(10**6) == 234097
    assert stable_random("a", "b").random() != stable_random("ab").random()


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ((0.5, 0.5), "validation_fraction 0.5 and test_fraction 0.5 leave nothing"),
        ((0.1, 0.95), "validation_fraction 0.1 and test_fraction 0.95 leave nothing"),
    ],
)
def test_impossible_fractions_are_refused(fractions, message):
    validation, test = fractions
    with pytest.raises(DataError, match=message):
        DataSection(kind="cldr", validation_fraction=validation, test_fraction=test)


def test_a_corpus_without_training_pairs_is_refused():
    with pytest.raises(DataError, match=r"there are no pairs to train on \(0 for validation, 0 for test\)"):
        split([])


def test_texts_are_of_the_training_split_only():
    corpus = split([str(n) for n in range(50)])
    texts = list(corpus.texts())
    assert len(texts) == 2 * len(corpus.train)
    assert not {pair.target for pair in corpus.test} & set(texts)


def test_texts_of_a_large_corpus_are_sampled(monkeypatch):
    corpus = split([str(n) for n in range(3000)])
    everything = list(corpus.texts())
    sampled = list(corpus.texts(1500))
    assert len(sampled) == 2 * 1500
    assert set(zip(sampled[::2], sampled[1::2], strict=True)) < set(
        zip(everything[::2], everything[1::2], strict=True)
    ), "whole pairs"
    assert sampled == [text for text in everything if text in set(sampled)], "in the corpus's order"
    monkeypatch.setattr(splits, "MAX_TOKENIZER_EXAMPLES", 1500)
    assert list(corpus.texts()) == sampled


def test_a_tag_goes_before_the_source():
    assert tagged("in three days", "pt_BR") == "<2pt_BR> in three days"
