"""Pairs as token ids: a map-style dataset for encoder-decoders and for decoder-only models."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.pairs import Pair
from hf_gpipe.errors import DataError

logger = logging.getLogger(__name__)

# A label of this value is no target, in transformers' losses and in ours.
IGNORE_INDEX = -100


class TokenizedPairs:
    """A dataset of {"input_ids": [...], "labels": [...]}, one for each pair, in the order of the pairs.

    For an encoder-decoder, input_ids are the source's tokens and labels the target's, each with the special tokens of
    the tokenizer. A decoder-only model reads `source </s> target </s>` in input_ids, and labels repeat it with the
    source masked, so that the target alone is learnt. Sources longer than `max_source_tokens` and targets longer than
    `max_target_tokens`, special tokens included, are cut before their </s>; how many were cut is logged and kept in
    `num_truncated_sources` and `num_truncated_targets`.

    Raises DataError for limits below 2, and for a decoder-only model's tokenizer that has no end-of-sequence token.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_source_tokens: int,
        max_target_tokens: int,
        decoder_only: bool = False,
    ) -> None:
        self._decoder_only = decoder_only
        self._sources, self.num_truncated_sources = encode_sources(
            [pair.source for pair in pairs], tokenizer, max_source_tokens, decoder_only=decoder_only
        )
        self._targets, self.num_truncated_targets = _encode_targets(
            [pair.target for pair in pairs], tokenizer, max_target_tokens, decoder_only=decoder_only
        )
        if self.num_truncated_sources or self.num_truncated_targets:
            logger.warning(
                "of %d pairs, %d sources were cut to %d tokens and %d targets to %d tokens",
                len(pairs),
                self.num_truncated_sources,
                max_source_tokens,
                self.num_truncated_targets,
                max_target_tokens,
            )

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        source, target = self._sources[index], self._targets[index]
        if self._decoder_only:
            return {"input_ids": source + target, "labels": [IGNORE_INDEX] * len(source) + target}
        return {"input_ids": source, "labels": target}

    @property
    def lengths(self) -> list[int]:
        """The tokens of each pair, source and target together: what batches are made by."""
        return [len(source) + len(target) for source, target in zip(self._sources, self._targets, strict=True)]


def encode_sources(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_source_tokens: int, *, decoder_only: bool = False
) -> tuple[list[list[int]], int]:
    """The token ids of each source, as in training and as a prompt for generation, and how many of them were cut."""
    suffix = []
    if decoder_only:
        # Some tokenizers end a text with </s> on their own; the others need it to part source and target.
        end = _end_of_sequence(tokenizer)
        suffix = [] if tokenizer("").input_ids[-1:] == end else end
    return _encode(sources, tokenizer, max_source_tokens, "max_source_tokens", suffix)


def _encode_targets(
    targets: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_target_tokens: int, *, decoder_only: bool
) -> tuple[list[list[int]], int]:
    if decoder_only:
        end = _end_of_sequence(tokenizer)
        return _encode(targets, tokenizer, max_target_tokens, "max_target_tokens", end, add_special_tokens=False)
    # As the target side: multilingual tokenizers such as mBART's then put the target language's tokens around it.
    return _encode(targets, tokenizer, max_target_tokens, "max_target_tokens", [], as_target=True)


def _encode(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    key: str,
    suffix: list[int],
    *,
    as_target: bool = False,
    add_special_tokens: bool = True,
) -> tuple[list[list[int]], int]:
    """The ids of each text followed by `suffix`, at most `max_tokens` long, and how many texts were cut for that."""
    if max_tokens < 2:
        raise DataError(f"{key} is {max_tokens}; it must be at least 2, for one token and the end of the sequence")
    limit = max_tokens - len(suffix)

    def encode(some: list[str], truncation: bool) -> list[list[int]]:
        if not some:
            return []
        batch = {"text_target" if as_target else "text": some}
        ids: list[list[int]] = tokenizer(
            **batch,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
            max_length=limit if truncation else None,
            verbose=False,
        )["input_ids"]
        return ids

    rows = encode(list(texts), truncation=False)
    long = [index for index, row in enumerate(rows) if len(row) > limit]
    # The tokenizer itself cuts, since it knows which special tokens stand where.
    for index, row in zip(long, encode([texts[index] for index in long], truncation=True), strict=True):
        rows[index] = row
    return [row + suffix for row in rows], len(long)


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which a decoder-only model needs "
            "between source and target; set its eos_token"
        )
    return [tokenizer.eos_token_id]
