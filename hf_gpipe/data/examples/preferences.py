"""Preferences as token ids: prompts with a chosen and a rejected answer, which are neighbours in mini-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chat_labels import ids_of
from hf_gpipe.data.examples.chats import num_common, preference_of
from hf_gpipe.data.examples.encoded import EncodedRows
from hf_gpipe.data.examples.rows import Read, ReadRow
from hf_gpipe.errors import DataError


class PreferenceExamples(EncodedRows):
    """A dataset of {"prompt_ids": [...], "chosen_ids": [...], "rejected_ids": [...]}.

    The ids are those of TRL's DPOTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: preferences in any form that `preference_of` in data/examples/chats.py describes: a list, a
            `datasets.Dataset`, or the split of a corpus.
        tokenizer: its chat template is applied to messages. Text is joined as it is, with an end-of-sequence token
            behind the answers.
        max_length: tokens to which a prompt with its answer is cut, from the start on; None: they are not cut. Rows
            whose prompt alone is as long are dropped; `num_dropped` and `num_truncated` count them, and they are
            logged.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, columns = "preferences", ("prompt_ids", "chosen_ids", "rejected_ids")
    _what, _dropped = "rows", "their prompt is as long"
    _read: Read = staticmethod(preference_of)
    #: The columns of text with the answers to the prompt.
    _answers: tuple[str, ...] = ("chosen", "rejected")
    #: Whether they are cut here; otherwise the collator cuts its rows.
    _cuts_answers = True

    def _example(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
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
        end, answers = self._tokenizer.eos_token, [row[name] for name in self._answers]
        if isinstance(row["prompt"], str) and end is not None:
            answers = [answer if answer.endswith(end) else answer + end for answer in answers]
        return [ids_of(self._tokenizer, where, row, row["prompt"] + answer) for answer in answers]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the longer answer of each example with its prompt, for length bucketing."""
        longest = [max(own) for own in zip(*(self._lengths_of(f"{n}_ids") for n in self._answers), strict=True)]
        return [a + b for a, b in zip(self._lengths_of("prompt_ids"), longest, strict=True)]


class PreferenceCollator(PairCollator):
    """Mini-batches of {"prompt_ids", "chosen_ids", "rejected_ids"}: each chosen row is followed by its rejected one.

    Returns input_ids, attention_mask and labels (2 N, T), padded on the right; labels are -100 in prompts. Where the
    rows have "ref_chosen_logps" and "ref_rejected_logps", also ref_logps (2 N,) in float64.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        both = [(row["prompt_ids"], row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")]
        batch = self.of_answers(both)
        if "ref_chosen_logps" in rows[0]:
            values = [row[name] for row in rows for name in ("ref_chosen_logps", "ref_rejected_logps")]
            batch["ref_logps"] = torch.tensor(values, dtype=torch.float64)
        return batch
