"""Pairs as token ids: a map-style dataset for encoder-decoders and for decoder-only models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import cached_property, partial
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.data.prepared import cached_table, fingerprint
from hf_gpipe.data.stream import ResumableStream
from hf_gpipe.data.tokenizer import identity_of_tokenizer
from hf_gpipe.errors import DataError
from hf_gpipe.progress import progress
from hf_gpipe.tasks.translation.language_codes import LanguageCodes
from hf_gpipe.tasks.translation.pairs import Pair, languages_of, texts_in_blocks, without_tag
from hf_gpipe.tasks.translation.threads import in_turn

if TYPE_CHECKING:
    from hf_gpipe.tasks.translation.stream import PairStream

logger = logging.getLogger(__name__)

# A tokenizer is faster with many texts at a time; a stream that is resumed reads at most so many pairs again.
_PAIRS_AT_ONCE = 256
# Texts of a side, in each thread, whose ids are remembered: tens of megabytes.
_REMEMBERED_TEXTS = 100_000
_PAIRS_OF_ONE_THREAD = 20_000

_SCHEMA = pyarrow.schema([(name, pyarrow.list_(pyarrow.int32())) for name in ("source", "target")])


class TokenizedPairs:
    """A dataset of {"input_ids": [...], "labels": [...]}, one for each pair, in the order of the pairs.

    For an encoder-decoder, input_ids are the source's tokens and labels the target's, each with the special tokens of
    the tokenizer. A decoder-only model reads `source </s> target </s>` in input_ids, and labels repeat it with the
    source masked, so that the target alone is learnt. Of a tokenizer that has codes of languages, an encoder-decoder's
    source and target are tokens in their own languages, without a tag; `language_codes` has the codes of those that
    the tokenizer calls otherwise. Sources longer than `max_source_tokens` and targets longer than
    `max_target_tokens`, special tokens included, are cut before their </s>; how many were cut is kept in
    `num_truncated_sources` and `num_truncated_targets`, and logged if `warns`.

    Raises DataError for limits below 2, for a decoder-only model's tokenizer that has no end-of-sequence token, and for
    a language that the tokenizer does not know.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_source_tokens: int,
        max_target_tokens: int,
        decoder_only: bool = False,
        language_codes: Mapping[str, str] = MappingProxyType({}),
        warns: bool = True,
    ) -> None:
        self._decoder_only, self._pairs = decoder_only, pairs
        self._tokenizer, self._max_target_tokens = tokenizer, max_target_tokens
        #: None: the tokenizer has none, or the model's rows have tags.
        self.codes = None if decoder_only else LanguageCodes.of(tokenizer, language_codes)
        tokenize = _Tokenize(tokenizer, max_source_tokens, max_target_tokens, decoder_only, language_codes)
        made_of: str | None = getattr(pairs, "fingerprint", None)
        if made_of is None:
            self._table = pyarrow.Table.from_batches(list(tokenize.batches(pairs)), _SCHEMA)
            truncated = tokenize.num_truncated
        else:
            limits: list[Any] = [max_source_tokens, max_target_tokens, decoder_only]
            if self.codes is not None:
                limits.append(dict(language_codes))
            # Entries of "tokens" alone, of earlier releases, have another file with the counts.
            key = fingerprint("counted tokens", made_of, identity_of_tokenizer(tokenizer), limits)
            batches = tokenize.batches(pairs)
            self._table, truncated = cached_table("tokens", key, _SCHEMA, batches, lambda: tokenize.num_truncated)
        self.num_truncated_sources, self.num_truncated_targets = truncated
        if warns and (self.num_truncated_sources or self.num_truncated_targets):
            logger.warning(
                "of %d pairs, %d sources were cut to %d tokens and %d targets to %d tokens",
                len(pairs),
                self.num_truncated_sources,
                max_source_tokens,
                self.num_truncated_targets,
                max_target_tokens,
            )

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        source, target = (column[index].as_py() for column in self._table.columns)
        if self._decoder_only:
            return text_entries(source + target, labels=[IGNORED_LABEL] * len(source) + target)
        return text_entries(source, labels=target)

    @cached_property
    def languages(self) -> list[str]:
        """The language of each pair, by which pairs may be sampled."""
        return languages_of(self._pairs)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each pair, source and target together, for length bucketing."""
        sources, targets = (_lengths(column) for column in self._table.columns)
        added: list[int] = pyarrow.compute.add(sources, targets).to_numpy().tolist()
        return added

    @property
    def target_tokens(self) -> list[int]:
        """The number of labels of each pair that have a loss."""
        counts: list[int] = _lengths(self._table.column("target")).to_numpy().tolist()
        return counts

    @property
    def num_characters(self) -> list[int]:
        """The characters of each target that its tokens stand for: of one that was cut, those of the tokens left."""
        counts = []
        for pair, ids in zip(self._pairs, self._table.column("target"), strict=True):
            # Only a target of this length may have been cut.
            is_full = len(ids) >= self._max_target_tokens
            (text,) = self.decoded([ids.as_py()]) if is_full else [pair.target]
            counts.append(len(text))
        return counts

    def decoded(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of the token ids of some targets, without special tokens and tokens of languages."""
        if self.codes is not None:
            return self.codes.texts(rows)
        texts: list[str] = self._tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts


class _Tokenize:
    """Pairs to token ids, a block at a time; counts the texts that were cut."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_source_tokens: int,
        max_target_tokens: int,
        decoder_only: bool,
        language_codes: Mapping[str, str],
    ) -> None:
        codes = None if decoder_only else LanguageCodes.of(tokenizer, language_codes)
        self._has_codes = codes is not None
        suffix: list[int] = []
        of_target: dict[str, Any] = {"as_target": True}
        end = _end_of_sequence(tokenizer) if decoder_only else []
        if decoder_only:
            # Some tokenizers end a text with </s> on their own; the others need it to part source and target.
            suffix = [] if token_ids(tokenizer(""))[-1:] == end else end
            of_target = {"add_special_tokens": False}
        #: Sources and targets.
        self.num_truncated = [0, 0]
        self._sides = (
            _Side(tokenizer, max_source_tokens, "max_source_tokens", suffix, codes),
            _Side(tokenizer, max_target_tokens, "max_target_tokens", end, codes, **of_target),
        )

    def __call__(self, block: tuple[list[str], ...]) -> pyarrow.RecordBatch:
        """The ids of sources and targets, as rows of an Arrow table."""
        sources, targets, source_languages, target_languages = block
        if self._has_codes:
            sources = list(map(without_tag, sources, target_languages))
        of_source, of_target = self._sides
        columns = of_source.encode(sources, source_languages), of_target.encode(targets, target_languages)
        return pyarrow.record_batch([*map(_list_array, columns)], schema=_SCHEMA)

    def batches(self, pairs: Sequence[Pair]) -> Iterator[pyarrow.RecordBatch]:
        """The ids of all pairs, in order."""
        # Half of the time goes into Python objects. A second thread needs its own tokenizer, whose copy takes time.
        workers = [self, deepcopy(self)] if len(pairs) > _PAIRS_OF_ONE_THREAD else [self]
        with progress(None, "tokenising", "pairs", len(pairs)) as shown:
            for batch in in_turn(workers, texts_in_blocks(pairs)):
                yield batch
                shown.update(len(batch))
        self.num_truncated = [sum(side) for side in zip(*(worker.counts() for worker in workers), strict=True)]

    def counts(self) -> list[int]:
        """The sources and targets that were cut."""
        return [side.num_truncated for side in self._sides]


class _Side:
    """The sources or the targets: each text to its ids and a suffix, at most `max_tokens` together.

    A text is encoded once as long as it is remembered: in a corpus of many languages the English sentences recur.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int,
        key: str,
        suffix: list[int],
        codes: LanguageCodes | None,
        *,
        as_target: bool = False,
        add_special_tokens: bool = True,
    ) -> None:
        if max_tokens < 2:
            raise DataError(f"{key} is {max_tokens}; it must be at least 2, for one token and the end of the sequence")
        self._tokenizer, self._suffix, self._limit = tokenizer, suffix, max_tokens - len(suffix)
        self._argument, self._language = ("text_target", "tgt_lang") if as_target else ("text", "src_lang")
        self._codes, self._add_special_tokens = codes, add_special_tokens
        #: The ids of texts of a language, and whether the text was cut.
        self._known: dict[tuple[str, str], tuple[np.ndarray, bool]] = {}
        self.num_truncated = 0

    def encode(self, texts: Sequence[str], languages: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, which has a language where the tokenizer has codes."""
        if len(self._known) > _REMEMBERED_TEXTS:
            self._known.clear()
        keys = list(zip(repeat("") if self._codes is None else languages, texts, strict=self._codes is not None))
        new: dict[str, list[str]] = {}
        for language, text in dict.fromkeys(keys):
            if (language, text) not in self._known:
                new.setdefault(language, []).append(text)
        for language, of_language in new.items():
            with nullcontext() if self._codes is None else self._codes.side(self._language, language):
                self._learn(language, of_language)
        encoded = [self._known[key] for key in keys]
        self.num_truncated += sum(is_cut for _, is_cut in encoded)
        return [ids for ids, _ in encoded]

    def _learn(self, language: str, texts: list[str]) -> None:
        rows = self._ids(texts, truncation=False)
        long = [index for index, row in enumerate(rows) if len(row) > self._limit]
        # The tokenizer itself cuts, since it knows which special tokens stand where.
        for index, row in zip(long, self._ids([texts[index] for index in long], truncation=True), strict=True):
            rows[index] = row
        are_cut = set(long)
        for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
            self._known[language, text] = np.array(row + self._suffix, dtype=np.int32), index in are_cut

    def _ids(self, texts: list[str], truncation: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            **{self._argument: texts},
            add_special_tokens=self._add_special_tokens,
            # Half of the time goes into what is returned.
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=truncation,
            max_length=self._limit if truncation else None,
            verbose=False,
        )
        ids: list[list[int]] = token_ids(encoded)
        return ids


def _list_array(rows: list[np.ndarray]) -> pyarrow.ListArray:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(np.concatenate(rows)))


def _lengths(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    return pyarrow.compute.list_value_length(column)


class StreamedExamples(ResumableStream):
    """The examples of TokenizedPairs over a stream of pairs: an iterable of {"input_ids", "labels"} with a state.

    Raises DataError as TokenizedPairs does, once the first row is asked for.
    """

    def __init__(
        self,
        stream: PairStream,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_source_tokens: int,
        max_target_tokens: int,
        decoder_only: bool = False,
        language_codes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        source, target = max_source_tokens, max_target_tokens
        #: The most ids and labels that a row can have, for the planner.
        self.longest = (source + target, source + target) if decoder_only else (source, target)
        self._tokenize = partial(
            TokenizedPairs,
            tokenizer=tokenizer,
            max_source_tokens=max_source_tokens,
            max_target_tokens=max_target_tokens,
            decoder_only=decoder_only,
            language_codes=language_codes,
        )
        self._has_told = False
        super().__init__(stream, self._tokenized, _PAIRS_AT_ONCE)

    def _tokenized(self, pairs: Sequence[Pair]) -> TokenizedPairs:
        rows = self._tokenize(pairs, warns=not self._has_told)
        self._has_told |= bool(rows.num_truncated_sources or rows.num_truncated_targets)
        return rows


def _end_of_sequence(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, which a decoder-only model needs "
            "between source and target; set its eos_token"
        )
    return [tokenizer.eos_token_id]
