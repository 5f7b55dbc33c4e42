"""Collates examples into the tensors of a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import text_entries, token_ids


@dataclass(frozen=True)
class PairCollator:
    """Pads examples of {"input_ids", "labels"} to the longest one of the mini-batch.

    Returns input_ids and attention_mask of shape (B, T) and, if the examples have them, labels of shape (B, T'), all of
    torch.long. Padding goes to the right: `pad_token_id` in input_ids, 0 in attention_mask, -100 in labels.
    """

    pad_token_id: int

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> PairCollator:
        """A collator with the tokenizer's padding token; any token if it has none, as padding is masked."""
        tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return cls(next(token for token in tokens if token is not None))

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = self.of_ids([token_ids(row) for row in rows])
        if "labels" in rows[0]:
            batch["labels"] = self._pad([row["labels"] for row in rows], IGNORED_LABEL)
        return batch

    def of_ids(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """A mini-batch of ids alone."""
        mask = self._pad([[1] * len(row) for row in rows], 0)
        return text_entries(self._pad(rows, self.pad_token_id), mask)

    def of_ids_on_the_left(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """The same, padded on the left."""
        return {name: tensor.flip(1) for name, tensor in self.of_ids([row[::-1] for row in rows]).items()}

    def of_answers(
        self, pairs: Sequence[tuple[list[int], list[int]]], max_length: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Prompts with an answer each as rows (N, T), cut to `max_length` tokens; labels are -100 in prompts."""
        kept = slice(max_length)
        labels = [([IGNORED_LABEL] * len(prompt) + answer)[kept] for prompt, answer in pairs]
        batch = self.of_ids([(prompt + answer)[kept] for prompt, answer in pairs])
        return batch | {"labels": self._pad(labels, IGNORED_LABEL)}

    def _pad(self, rows: list[list[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def tokens_of(batch: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each row of a mini-batch, without padding."""
    rows = zip(token_ids(batch), batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]
