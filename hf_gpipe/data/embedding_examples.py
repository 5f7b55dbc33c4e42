"""Examples of texts that belong together, and mini-batches of them: their texts are neighbouring rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.encoded import EncodedRows
from hf_gpipe.data.fields import check_characters
from hf_gpipe.data.rows import ReadRow
from hf_gpipe.errors import DataError, listed
from hf_gpipe.losses.loss import LOSS_NUMBER

#: Columns with the score of a row, as in sentence-transformers.
_SCORES = ("score", "scores", "label", "labels")


def embedded_of(
    where: str,
    row: Mapping[str, Any],
    *,
    texts: int | None = None,
    prompts: Mapping[str, str] | str | None = None,
) -> dict[str, Any]:
    """A row's {"texts", "score"}.

    Args:
        where: the row's name in messages.
        row: an anchor, its positive and perhaps negatives, or two texts and a score. The columns may have any names
            and are taken in their order, except for those of `_SCORES`; "anchor" and "positive" come first.
        texts: how many there must be; None: at least two.
        prompts: what goes before the texts of each column, or before all texts.

    Raises:
        DataError: another number of texts, a column that is no text, a prompt of a column that the row lacks, or a
            score that is no finite number.
    """
    prompts = dict.fromkeys(row, prompts) if isinstance(prompts, str) else prompts or {}
    if unknown := [name for name in prompts if name not in row]:
        raise DataError(f"{where} has the columns {listed(list(row))}, and prompts has {unknown[0]!r}; correct prompts")
    given = {name: value for name, value in row.items() if value is not None}
    score = next((given.pop(name) for name in _SCORES if name in given), None)
    names = sorted(given, key=lambda name: ["anchor", "positive"].index(name) if name in ("anchor", "positive") else 2)
    for name in names:
        if not isinstance(given[name], str) or not given[name].strip():
            kind = "empty" if isinstance(given[name], str) else f"a {type(given[name]).__name__}"
            raise DataError(f"{where}: {name!r} is {kind}; it must be text: leave the column out, or the row")
        check_characters(given[name], name, where)
    if len(names) < 2 or texts not in (None, len(names)):
        raise DataError(
            f"{where} has {len(names)} texts ({listed(names) or 'none'}), and {texts or 'at least 2'} are needed: an "
            "anchor, its positive and perhaps negatives, or two texts and a score; set texts to the number of columns"
        )
    if score is not None and (
        isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)
    ):
        raise DataError(f"{where}: the score is {score!r}; it must be a number")
    return {"texts": [prompts.get(name, "") + given[name] for name in names], "score": score}


def _texts(ids: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """The ids of each text of an example, from those of all of them and from the lengths."""
    return [list(ids[start:stop]) for start, stop in pairwise(accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class EmbeddingCollator(PairCollator):
    """Mini-batches of {"text_ids", "text_lengths", "score"}: the texts of an example are neighbouring rows.

    Returns input_ids and attention_mask (N k, T) of N examples of k texts, padded on the right, and labels (N k,) in
    float32, the score of the example.

    Attributes:
        texts: k.
        needs_score: whether an example without a score is an error.
    """

    texts: int = 2
    needs_score: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        texts = []
        for row in rows:
            lengths = row["text_lengths"]
            if len(lengths) != self.texts:
                raise DataError(
                    f"an example has {len(lengths)} texts, and the loss is of {self.texts}; set texts to {len(lengths)}"
                )
            texts += _texts(row["text_ids"], lengths)
        scores = torch.tensor([row["score"][0] for row in rows], dtype=torch.float32)
        if self.needs_score and bool(scores.isnan().any()):
            raise DataError("an example has no score, which the loss needs; give the rows a column 'score'")
        return self.of_ids(texts) | {"labels": scores.repeat_interleave(self.texts)}


@dataclass(frozen=True)
class NumberedCollator:
    """Mini-batches of examples whose datasets have different losses: `collators` has one for each number of a loss.

    Returns the mini-batch of the collator, and its number as loss_number (N k,).
    """

    collators: Sequence[Callable[[Sequence[Mapping[str, Any]]], Mapping[str, torch.Tensor]]]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        number = rows[0][LOSS_NUMBER]
        batch = self.collators[number](rows)
        return {**batch, LOSS_NUMBER: torch.full((len(batch["labels"]),), number)}


class EmbeddingExamples(EncodedRows):
    """A dataset of {"text_ids": [...], "text_lengths": [...], "score": [s]}, kept in the cache of `datasets`.

    The ids of all texts of an example stand one after the other. The score is NaN where a row has none.

    Args:
        rows: as `embedded_of` reads them, or the split of a corpus that it has read.
        tokenizer: adds the special tokens that it adds to one text.
        max_length: tokens to which a text is cut, by the tokenizer's own truncation; `num_truncated` counts the
            examples.
        texts: of each example; None: as many as the first one has.
        prompts: as for `embedded_of`.

    Attributes:
        loss_number: the number of its loss among those of its trainer, which each example then has; None: there is one.

    Raises:
        DataError: a row of another form, or a text of which the tokenizer leaves no token.
    """

    _name, columns, _numbers = "embeddings", ("text_ids", "text_lengths", "score"), ("score",)
    _what, _dropped, collator = "examples", "", EmbeddingCollator
    loss_number: int | None = None

    def __init__(
        self,
        rows: Iterable[ReadRow | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = 512,
        texts: int | None = None,
        prompts: Mapping[str, str] | str | None = None,
    ) -> None:
        self.read = partial(embedded_of, texts=texts, prompts=prompts)
        super().__init__(rows, tokenizer, max_length=max_length)

    def encode(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...]:
        row = read.row
        texts = self._cut(read.where, row["texts"])
        score = math.nan if row["score"] is None else row["score"]
        return [token for ids in texts for token in ids], [len(ids) for ids in texts], [score]

    def _row(self, index: int) -> dict[str, Any]:
        row = super()._row(index)
        return row if self.loss_number is None else {**row, LOSS_NUMBER: self.loss_number}

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the longest text of each example, for length bucketing."""
        return [max(lengths) for lengths in self._table.column("text_lengths").to_pylist()]

    @property
    def keys(self) -> list[frozenset[int]]:
        """A number for each text of each example, the same for equal texts."""
        columns = (self._table.column(name).to_pylist() for name in ("text_ids", "text_lengths"))
        return [frozenset(hash(tuple(text)) for text in _texts(*own)) for own in zip(*columns, strict=True)]
