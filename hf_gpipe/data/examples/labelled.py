"""Texts with a label, one class of several, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.encoded import EncodedRows
from hf_gpipe.data.examples.rows import ReadRow
from hf_gpipe.data.fields import text_in, value_in
from hf_gpipe.errors import DataError, listed, nearest

UNLABELLED = -1
"""The label that data sets have in place of labels that they keep secret."""


def labelled_of(
    where: str, row: Mapping[str, Any], *, labels: Sequence[str], text_field: str = "text", label_field: str = "label"
) -> dict[str, Any]:
    """A row's {"text", "label"}, the label as a number.

    Args:
        where: the row's name in messages.
        row: has a text, and a label that is one of `labels` or the number of one.
        labels: the names of the classes.
        text_field: the field of the text; a dot leads into a field, as in `review.text`.
        label_field: the field of the label.

    Raises:
        DataError: a field that is missing, a text that is empty, or an unknown label; names the row and the field.
    """
    label = class_of(where, value_in(row, label_field, where), labels, label_field)
    return {"text": text_in(row, text_field, where), "label": label}


def class_of(where: str, label: Any, labels: Sequence[str], label_field: str) -> int:
    """The number of a label; arguments and errors are those of `labelled_of`."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if label == UNLABELLED:
        raise DataError(
            f"{where}: field {label_field!r} is {UNLABELLED}, as of a row without a label; evaluate on a split that "
            "has labels (evaluation.split), or leave such rows out"
        )
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(labels):
        hint = nearest(label, labels) if isinstance(label, str) else ""
        raise DataError(
            f"{where}: field {label_field!r} is {label!r}{hint}; it must be one of data.labels, "
            f"{listed(list(labels))}, or a number from 0 to {len(labels) - 1}"
        )
    return label


class LabelledExamples(EncodedRows):
    """A dataset of {"input_ids": [...], "labels": [class]}, kept in the cache of `datasets`.

    Args:
        rows: {"text", "label"} as `labelled_of` reads them, or the split of a corpus that it has read.
        tokenizer: adds the special tokens that it adds to one text.
        labels: the names of the classes.
        max_length: tokens to which a text is cut, by the tokenizer's own truncation; `num_truncated` counts those.

    Raises:
        DataError: a row of another form, or a text of which the tokenizer leaves no token.
    """

    _name = "labelled"
    _what, _dropped = "texts", ""

    def __init__(
        self,
        rows: Iterable[ReadRow | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        labels: Sequence[str],
        max_length: int = 1024,
    ) -> None:
        self._read = partial(labelled_of, labels=labels)
        super().__init__(rows, tokenizer, max_length=max_length)

    def _example(self, read: ReadRow) -> tuple[Sequence[int], ...]:
        row = read.row
        (ids,) = self._cut(read.where, [row["text"]])
        return ids, [row["label"]]


@dataclass(frozen=True)
class LabelCollator(PairCollator):
    """Mini-batches of {"input_ids", "labels": [class]}: labels (B,), the others as PairCollator makes them.

    `pad_token_id` must be that of the model's configuration, by which the model finds the last token of each row.
    """

    @classmethod
    def for_config(cls, config: PreTrainedConfig) -> LabelCollator:
        """A collator for a model of this configuration, which has a padding token."""
        return cls(config.get_text_config().pad_token_id)

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        return batch | {"labels": batch["labels"].squeeze(1)}
