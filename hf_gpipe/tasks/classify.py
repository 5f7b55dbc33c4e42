"""Texts with a label, one class of several, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.collate import ExampleCollator
from hf_gpipe.data.encoded import EncodedRows
from hf_gpipe.data.fields import class_of, text_in, value_in
from hf_gpipe.data.rows import Read, ReadRow
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, accuracy, measure_classes
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.training.loader import Collate


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
        self.read = partial(labelled_of, labels=labels)
        super().__init__(rows, tokenizer, max_length=max_length)

    def encode(self, read: ReadRow) -> tuple[Sequence[int], ...]:
        row = read.row
        (ids,) = self._cut(read.where, [row["text"]])
        return ids, [row["label"]]


@dataclass(frozen=True)
class LabelCollator(ExampleCollator):
    """Mini-batches of {"input_ids", "labels": [class]}, with labels (B,)."""

    columns: tuple[str, ...] | None = field(default=LabelledExamples.columns, kw_only=True)


class _Classes(Task):
    items, evaluating, head = "texts", "classifying the texts", "classes"

    def reader(self, recipe: Recipe) -> Read:
        data = recipe.data
        return partial(labelled_of, labels=data.labels, text_field=data.text_field, label_field=data.label_field)

    def size(self, data: DataSection, corpus: Any) -> str:
        return f"{super().size(data, corpus)}, {len(data.labels)} classes"

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> LabelledExamples:
        return LabelledExamples(split, processor, labels=recipe.data.labels, max_length=recipe.data.max_length)

    def collator(self, processor: Any, pipe: Pipeline) -> Collate:
        return LabelCollator.for_config(pipe.adapter.config)

    def given(self, recipe: Recipe) -> Mapping[str, Any]:
        return {"compute_metrics": accuracy}

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        """The negative log-likelihood of the right class per text, and how often the most likely class is right."""
        values = measure_classes(pipe, held_out, LabelCollator.for_config(pipe.adapter.config))
        return HeldOutReport("classification", values, ("texts", f"{values['num_rows']} texts"))


TASK = _Classes()
