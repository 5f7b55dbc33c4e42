"""Answers in steps, each of which is right or not, as token ids: for process rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.examples.encoded import EncodedRows
from hf_gpipe.data.examples.rows import ReadRow
from hf_gpipe.data.fields import text_in
from hf_gpipe.errors import DataError


def stepwise_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's "prompt", "completions" and "labels".

    Args:
        where: the row's name in messages.
        row: has `prompt`, a text; `completions`, the texts of its steps; and `labels`, true for each that is right.

    Raises:
        DataError: a field that is missing or of another form; names the row and the field.
    """
    steps, labels = row.get("completions"), row.get("labels")
    if not isinstance(steps, list) or not steps or not isinstance(labels, list) or len(steps) != len(labels):
        raise DataError(f"{where}: 'completions' and 'labels' must be lists, with a label for each of the steps")
    if wrong := [label for label in labels if not isinstance(label, bool | int) or label not in (0, 1)]:
        raise DataError(f"{where}: 'labels' has {wrong[0]!r}; a label is true where the step is right, else false")
    texts = [text_in({"completions": step}, "completions", where) for step in steps]
    return {"prompt": text_in(row, "prompt", where), "completions": texts, "labels": [int(label) for label in labels]}


class StepExamples(EncodedRows):
    """A dataset of {"input_ids": [...], "labels": [...]}: the label of a step is at its last token, -100 elsewhere.

    The ids are those of TRL's PRMTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: as `stepwise_of` reads them, or the split of a corpus that it has read.
        tokenizer: its beginning-of-sequence token, if it has one, stands before the prompt.
        step_separator: text behind each step, whose last token has the step's label.
        max_length: tokens to which a row is cut, from the start on; None: they are not cut. Rows in which no step is
            left are dropped.
        last_step_only: whether only the label of the last step is learnt.

    Raises:
        DataError: a row of another form, a separator without tokens, or no example.
    """

    _name = "steps"
    _what, _dropped = "answers", "no end of a step was left of them"
    _read = staticmethod(stepwise_of)

    def __init__(
        self,
        rows: Iterable[ReadRow | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        step_separator: str = "\n",
        max_length: int | None = 1024,
        last_step_only: bool = False,
    ) -> None:
        self._last_only, self._separator = last_step_only, tokenizer.encode(step_separator, add_special_tokens=False)
        if not self._separator:
            raise DataError(f"step_separator {step_separator!r} has no tokens; its last one has the label of a step")
        super().__init__(rows, tokenizer, max_length=max_length, options=(step_separator, last_step_only))

    def _example(self, read: ReadRow) -> tuple[Sequence[int], ...] | None:
        row, encode = read.row, partial(self._tokenizer.encode, add_special_tokens=False)
        begin = self._tokenizer.bos_token_id
        ids = [*([] if begin is None else [begin]), *encode(row["prompt"])]
        labels = [IGNORED_LABEL] * len(ids)
        for number, (text, label) in enumerate(zip(row["completions"], row["labels"], strict=True)):
            step = encode(text) + self._separator
            is_learnt = not self._last_only or number + 1 == len(row["labels"])
            ids += step
            labels += [IGNORED_LABEL] * (len(step) - 1) + [label if is_learnt else IGNORED_LABEL]
        kept = slice(self._max_length)
        self.num_truncated += len(ids) > len(ids[kept])
        if all(label == IGNORED_LABEL for label in labels[kept]):
            self.num_dropped += 1
            return None
        return ids[kept], labels[kept]
