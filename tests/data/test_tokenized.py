"""Pairs as token ids, for both kinds of model."""

from __future__ import annotations

import logging

import pytest
from tokenizers.processors import TemplateProcessing

from hf_gpipe.data import Pair, TokenizedPairs, encode_sources, train_tokenizer
from hf_gpipe.data.cldr import cldr_corpus
from hf_gpipe.errors import DataError

PAIRS = cldr_corpus(languages=["de"], examples_per_language=200).train
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
    prompts, _ = encode_sources([pair.source for pair in PAIRS], tokenizer, 100, decoder_only=True)
    for index, pair in enumerate(PAIRS):
        row, prompt = dataset[index], prompts[index]
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
