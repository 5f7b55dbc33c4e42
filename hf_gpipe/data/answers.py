"""Prompts with one or several answers each, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_gpipe.data.chat_labels import ids_of
from hf_gpipe.data.chats import num_common
from hf_gpipe.data.encoded import EncodedRows
from hf_gpipe.data.rows import ReadRow
from hf_gpipe.errors import DataError


class AnsweredRows(EncodedRows):
    """A dataset of "prompt_ids" and the ids of each answer, kept in the cache of `datasets`.

    The column of an answer's ids has the name of the answer in the row, with "_ids" behind it.

    Args:
        rows: with a "prompt" and the answers, all of them text or all lists of messages.
        tokenizer: its chat template is applied to messages. Text is joined as it is, with an end-of-sequence token
            behind the answers.
        max_length: tokens to which a prompt with its answer is cut, from the start on; None: they are not cut. Rows
            whose prompt alone is as long are dropped; `num_dropped` and `num_truncated` count them, and they are
            logged.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _what, _dropped = "rows", "their prompt is as long"
    #: Whether answers are cut here; otherwise the collator cuts its rows.
    _cuts_answers = True

    def encode(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
        row = read.row
        prompt = ids_of(self._tokenizer, read.where, row, row["prompt"], add_generation_prompt=True)
        wholes = self._answered(read.where, row)
        # Tokens may merge across the border, and templates may end the prompt in another way without an answer.
        start = min(num_common(prompt, whole) for whole in wholes)
        most = self._max_length
        if most is not None and start >= most:
            self.num_dropped += 1
            return None
        self.num_truncated += most is not None and max(map(len, wholes)) > most
        answers = [whole[start : most if self._cuts_answers else None] for whole in wholes]
        self._check_tokens(read.where, "its prompt", prompt[:start])
        self._check_tokens(read.where, "an answer", *answers)
        return prompt[:start], *answers

    def _check_tokens(self, where: str, what: str, *parts: Sequence[int]) -> None:
        if not all(parts):
            raise DataError(f"{where}: the tokenizer and its template leave no tokens of {what}; leave the row out")

    def _answered(self, where: str, row: Mapping[str, Any]) -> list[list[int]]:
        """The ids of the prompt with each answer; text has the end-of-sequence token behind it."""
        end, answers = self._tokenizer.eos_token, [row[name.removesuffix("_ids")] for name in self.row_columns]
        if isinstance(row["prompt"], str) and end is not None:
            answers = [answer if answer.endswith(end) else answer + end for answer in answers]
        return [ids_of(self._tokenizer, where, row, row["prompt"] + answer) for answer in answers]
