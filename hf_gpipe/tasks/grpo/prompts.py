"""Prompts of rollouts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.chat_labels import ids_of
from hf_gpipe.data.chats import given_in
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import DataError


def prompted_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's {"prompt", "answer"}: text or messages, and text. Raises DataError for another form, by the row."""
    prompt, answer = row.get("prompt"), row.get("answer")
    if not (isinstance(prompt, str | list) and prompt):
        raise DataError(f"{where}: 'prompt' is {prompt!r}; it must be text, or a list of messages")
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{where}: 'answer' is {answer!r}; it must be text, which completions are compared with")
    return {"prompt": prompt, "answer": answer}


@dataclass(frozen=True)
class PromptCollator(PairCollator):
    """Mini-batches of {"prompt_ids", "row"}: input_ids and attention_mask (N, T), padded on the left, and row (N,)."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        prompts = self.of_ids_on_the_left([row["prompt_ids"] for row in rows])
        return prompts | {"row": torch.tensor([row["row"] for row in rows])}


class PromptExamples:
    """A dataset of {"prompt_ids": [...], "row": i} of rows with a "prompt", text or messages, and any other columns.

    Args:
        rows: a list, or a `datasets.Dataset`.
        tokenizer: its chat template is applied to messages.
        max_length: the most tokens of a prompt; None: any number.
        chat_template_kwargs: variables for the template, where a row's column of this name has no others.

    Raises:
        DataError: no row, a row without a prompt, or with a prompt that is too long.
    """

    columns, takes_ids = ("prompt_ids", "row"), False
    collator = PromptCollator

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.rows = list(rows)
        self._variables = dict(chat_template_kwargs or {})
        if not self.rows:
            raise DataError("the dataset has no rows; give it at least one row with a 'prompt'")
        self._ids = [self._ids_of(f"row {number}", row, tokenizer) for number, row in enumerate(self.rows)]
        for number, length in enumerate(self.lengths):
            if max_length is not None and length > max_length:
                raise DataError(
                    f"row {number}: the prompt has {length} tokens, and max_length is {max_length}; raise it, or "
                    "leave the row out"
                )

    def _ids_of(self, where: str, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        prompt = row.get("prompt")
        if not isinstance(prompt, str | list):
            raise DataError(f"{where}: 'prompt' is {prompt!r}; it must be text, or a list of messages")
        given = given_in(where, row)
        given["chat_template_kwargs"] = {**self._variables, **given.get("chat_template_kwargs", {})}
        ids = ids_of(tokenizer, where, given, given["prompt"], add_generation_prompt=True)
        if not ids:
            raise DataError(f"{where}: the tokenizer leaves no tokens of the prompt; leave the row out")
        return ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt_ids": self._ids[index], "row": index}

    @cached_property
    def row_columns(self) -> list[str]:
        """The columns of any row, without the prompt."""
        return [name for name in dict.fromkeys(name for row in self.rows for name in row) if name != "prompt"]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt."""
        return [len(ids) for ids in self._ids]
