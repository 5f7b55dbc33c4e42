"""Pairs as token ids, for both kinds of model."""

from __future__ import annotations

import json
import logging
from itertools import islice

import pytest
from tokenizers.processors import TemplateProcessing

from hf_gpipe.data import Pair, StreamedExamples, TokenizedPairs, train_tokenizer
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation import tokenized
from hf_gpipe.tasks.translation.cldr import cldr_corpus

PAIRS = cldr_corpus(DataSection(kind="cldr", languages=["de"], examples_per_language=200)).train
LIMITS = {"max_source_tokens": 100, "max_target_tokens": 100}
EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [text for pair in PAIRS for text in (pair.source, pair.target)]
    return train_tokenizer(texts, 400, tmp_path_factory.mktemp("tokenizer"))


def test_encoder_decoder_rows_are_source_and_target(tokenizer):
    dataset = TokenizedPairs(PAIRS, tokenizer, **LIMITS)
    assert len(dataset) == len(PAIRS)
    for index, pair in enumerate(PAIRS):
        assert dataset[index] == {
            "input_ids": tokenizer(pair.source).input_ids,
            "labels": tokenizer(pair.target).input_ids,
        }
        assert dataset.lengths[index] == len(dataset[index]["input_ids"]) + len(dataset[index]["labels"])


def test_decoder_only_rows_learn_the_target_alone(tokenizer):
    dataset = TokenizedPairs(PAIRS, tokenizer, decoder_only=True, **LIMITS)
    for index, pair in enumerate(PAIRS):
        row, prompt = dataset[index], tokenizer(pair.source).input_ids
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["labels"] == [-100] * len(prompt) + row["input_ids"][len(prompt) :]
        assert tokenizer.decode(row["input_ids"]) == f"{pair.source}</s> {pair.target}</s>"
        assert dataset.lengths[index] == len(row["input_ids"])


def test_a_tokenizer_that_begins_but_does_not_end_its_texts_is_given_the_end(tokenizer):
    """As Llama's: `<s> source`, after which nothing would part the source from the target."""
    before = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    try:
        row = TokenizedPairs(PAIRS[:1], tokenizer, decoder_only=True, **LIMITS)[0]
    finally:
        tokenizer.backend_tokenizer.post_processor = before
    assert row["input_ids"][0] == 3
    assert row["input_ids"].count(EOS) == 2
    assert row["input_ids"].count(3) == 1
    assert row["labels"].count(EOS) == 1


@pytest.mark.parametrize("decoder_only", [False, True])
def test_long_texts_are_cut_before_their_end_counted_and_logged(tokenizer, caplog, decoder_only):
    pairs = [Pair("3 Tage " * 20, "3 days " * 30, "de", "x"), Pair("3 Tage", "3 days", "de", "y")]
    with caplog.at_level(logging.WARNING):
        dataset = TokenizedPairs(
            pairs, tokenizer, max_source_tokens=10, max_target_tokens=12, decoder_only=decoder_only
        )
    targets = [token for token in dataset[0]["labels"] if token != -100]
    source = dataset[0]["input_ids"][: len(dataset[0]["input_ids"]) - (12 if decoder_only else 0)]
    assert len(source) == 10
    assert source[-1] == EOS
    assert len(targets) == 12
    assert targets[-1] == EOS
    assert (dataset.num_truncated_sources, dataset.num_truncated_targets) == (1, 1)
    assert "of 2 pairs, 1 sources were cut to 10 tokens and 1 targets to 12 tokens" in caplog.text
    whole = TokenizedPairs(pairs[1:], tokenizer, **LIMITS, decoder_only=decoder_only)
    assert dataset[1] == whole[0]


def test_two_threads_and_what_they_remember_change_nothing(tokenizer, monkeypatch):
    pairs = [*PAIRS[:50], *PAIRS[:30], *PAIRS[:50]]
    limits = {"max_source_tokens": 8, "max_target_tokens": 8}
    alone = [TokenizedPairs([pair], tokenizer, **limits, warns=False) for pair in pairs]
    monkeypatch.setattr(tokenized, "texts_in_blocks", lambda pairs: _in_blocks(pairs, 7))
    monkeypatch.setattr(tokenized, "_PAIRS_OF_ONE_THREAD", 100)
    monkeypatch.setattr(tokenized, "_REMEMBERED_TEXTS", 30)
    together = TokenizedPairs(pairs, tokenizer, **limits)
    assert [together[index] for index in range(len(pairs))] == [each[0] for each in alone]
    assert 0 < together.num_truncated_sources == sum(each.num_truncated_sources for each in alone) < len(pairs)
    assert 0 < together.num_truncated_targets == sum(each.num_truncated_targets for each in alone) < len(pairs)


def _in_blocks(pairs, size):
    for start in range(0, len(pairs), size):
        block = pairs[start : start + size]
        yield [pair.source for pair in block], [pair.target for pair in block], [""] * len(block), [""] * len(block)


def test_nothing_is_logged_when_nothing_is_cut(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        TokenizedPairs(PAIRS, tokenizer, **LIMITS)
    assert not caplog.records


def test_no_pairs_give_an_empty_dataset(tokenizer):
    assert len(TokenizedPairs([], tokenizer, **LIMITS)) == 0
    assert TokenizedPairs([], tokenizer, **LIMITS).lengths == []


def test_limits_that_leave_no_room_are_refused(tokenizer):
    with pytest.raises(DataError, match="max_source_tokens is 1; it must be at least 2"):
        TokenizedPairs(PAIRS, tokenizer, max_source_tokens=1, max_target_tokens=8)
    with pytest.raises(DataError, match="max_target_tokens is 0"):
        TokenizedPairs(PAIRS, tokenizer, max_source_tokens=8, max_target_tokens=0)


def test_a_decoder_only_model_needs_an_end_of_sequence(tokenizer):
    tokenizer.eos_token, before = None, tokenizer.eos_token
    try:
        with pytest.raises(DataError, match="has no end-of-sequence token"):
            TokenizedPairs(PAIRS, tokenizer, decoder_only=True, **LIMITS)
    finally:
        tokenizer.eos_token = before


# ---------------------------------------------------------------------- streams


class PairsWithoutAnEnd:
    """PAIRS over and over; iterating goes on from where it stands."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        while True:
            pair = PAIRS[self.number % len(PAIRS)]
            self.number += 1
            yield pair

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("decoder_only", [False, True])
def test_a_stream_has_the_rows_of_its_pairs_and_goes_on_after_any_of_them(tokenizer, decoder_only):
    def streamed():
        return StreamedExamples(PairsWithoutAnEnd(), tokenizer, decoder_only=decoder_only, **LIMITS)

    dataset = TokenizedPairs(PAIRS, tokenizer, decoder_only=decoder_only, **LIMITS)
    expected = [dataset[index % len(PAIRS)] for index in range(600)]
    rows, states = streamed(), []
    for most, name in zip(rows.longest, ("input_ids", "labels"), strict=True):
        assert most >= max(len(row[name]) for row in expected)
    states.append(rows.state_dict())
    for row, wanted in zip(rows, expected, strict=False):
        assert row == wanted
        states.append(json.loads(json.dumps(rows.state_dict())))
    for number in (0, 1, 100, 255, 256, 257, 511, 512, 513, 599):
        other = streamed()
        other.load_state_dict(states[number])
        assert other.state_dict() == states[number]
        assert list(islice(other, 3)) == [dataset[index % len(PAIRS)] for index in range(number, number + 3)]
        if number + 3 < len(states):
            assert other.state_dict() == states[number + 3]
        assert list(islice(other, 3)) == expected[:3], "an iteration of which nothing was said begins at the beginning"


def test_a_stream_tells_once_that_rows_are_cut(tokenizer, caplog):
    rows = StreamedExamples(PairsWithoutAnEnd(), tokenizer, max_source_tokens=3, max_target_tokens=100)
    with caplog.at_level(logging.WARNING):
        list(islice(rows, 600))
    assert len(caplog.records) == 1
    assert "cut to 3 tokens" in caplog.text


def test_a_state_of_something_else_is_refused(tokenizer):
    with pytest.raises(DataError, match="is not a state of a stream of rows"):
        StreamedExamples(PairsWithoutAnEnd(), tokenizer, **LIMITS).load_state_dict({"number": 3})
