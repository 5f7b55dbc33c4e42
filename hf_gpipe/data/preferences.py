"""Preferences as token ids: prompts with a chosen and a rejected answer, which are neighbours in mini-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.chat_labels import apply_template
from hf_gpipe.data.chats import Conversation, num_common, preference_of
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.encoded import EncodedConversations, conversations_of
from hf_gpipe.data.tokenized import IGNORE_INDEX
from hf_gpipe.errors import DataError


class PreferenceExamples(EncodedConversations):
    """A dataset of {"prompt_ids": [...], "chosen_ids": [...], "rejected_ids": [...]}.

    The ids are those of TRL's DPOTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: preferences in any form that `hf_gpipe.data.chats.preference_of` describes: a list, a `datasets.Dataset`,
            or the split of a corpus.
        tokenizer: its chat template is applied to messages. Text is joined as it is, with an end-of-sequence token
            behind the answers.
        max_length: tokens to which a prompt with its answer is cut, from the start on; None: they are not cut. Rows
            whose prompt alone is as long are dropped; `num_dropped` and `num_truncated` count them, and they are
            logged.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, _columns = "preferences", ("prompt_ids", "chosen_ids", "rejected_ids")
    _what, _dropped = "rows", "their prompt is as long"
    #: A column that rows of text have not; and the columns of text with the answers to the prompt.
    known_by = "prompt_ids"
    _answers: tuple[str, ...] = ("chosen", "rejected")
    #: Whether they are cut here; otherwise the collator cuts its rows.
    _cuts_answers = True

    def __init__(
        self,
        rows: Iterable[Conversation | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = 1024,
    ) -> None:
        if max_length is not None and max_length < 2:
            raise DataError(f"max_length is {max_length}; it must be at least 2, for a prompt and an answer")
        conversations = self._conversations(rows, tokenizer)
        self._tokenizer, self._max_length = tokenizer, max_length
        self._encode(conversations, tokenizer, max_length)
        if not len(self):
            raise DataError(
                f"there are no preferences: of {len(conversations)} rows, {self.num_dropped} were dropped because "
                f"{self._dropped}; raise max_length, which is {max_length} tokens, or give other rows"
            )

    def _conversations(
        self, rows: Iterable[Conversation | Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
    ) -> list[Conversation]:
        return conversations_of(rows, tokenizer, preference_of)

    def _example(self, conversation: Conversation) -> tuple[Sequence[int], ...] | None:
        row = conversation.row
        prompt = self._ids(conversation.where, row, row["prompt"], add_generation_prompt=True)
        wholes = [self._ids(conversation.where, row, row["prompt"] + self._ended(row[n])) for n in self._answers]
        # Tokens may merge across the border, and templates may end the prompt in another way without an answer.
        start = min(num_common(prompt, whole) for whole in wholes)
        most = self._max_length
        if most is not None and start >= most:
            self.num_dropped += 1
            return None
        self.num_truncated += most is not None and max(map(len, wholes)) > most
        answers = [whole[start : most if self._cuts_answers else None] for whole in wholes]
        if not start or not all(answers):
            what = "its prompt" if not start else "an answer"
            raise DataError(
                f"{conversation.where}: the tokenizer and its template leave no tokens of {what}; leave the row out"
            )
        return prompt[:start], *answers

    def _ended(self, answer: Any) -> Any:
        """Text with the end-of-sequence token behind it."""
        end = self._tokenizer.eos_token
        return answer + end if isinstance(answer, str) and end is not None and not answer.endswith(end) else answer

    def _ids(
        self, where: str, row: Mapping[str, Any], content: Any, *, add_generation_prompt: bool = False
    ) -> list[int]:
        if isinstance(content, str):
            return list(self._tokenizer(content)["input_ids"])
        text = apply_template(
            self._tokenizer, where, row, content, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the longer answer of each example with its prompt, for length bucketing."""
        longest = [
            max(own) for own in zip(*(self._lengths_of(f"{n}_ids").tolist() for n in self._answers), strict=True)
        ]
        return [a + b for a, b in zip(self._lengths_of("prompt_ids").tolist(), longest, strict=True)]


@dataclass(frozen=True)
class PreferenceCollator:
    """Mini-batches of {"prompt_ids", "chosen_ids", "rejected_ids"}: each chosen row is followed by its rejected one.

    Returns input_ids, attention_mask and labels (2 N, T), padded on the right; labels are -100 in prompts. Where the
    rows have "ref_chosen_logps" and "ref_rejected_logps", also ref_logps (2 N,) in float64.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        both = [(row["prompt_ids"], row[name]) for row in rows for name in ("chosen_ids", "rejected_ids")]
        examples = [{"input_ids": p + a, "labels": [IGNORE_INDEX] * len(p) + a} for p, a in both]
        batch = PairCollator(self.pad_token_id)(examples)
        if "ref_chosen_logps" in rows[0]:
            values = [row[name] for row in rows for name in ("ref_chosen_logps", "ref_rejected_logps")]
            batch["ref_logps"] = torch.tensor(values, dtype=torch.float64)
        return batch
