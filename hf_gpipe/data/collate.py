"""Collates examples into the tensors of a mini-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """A collator with the tokenizer's padding token; any token if it has none, as padding is masked."""
        tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return cls(next(token for token in tokens if token is not None))

    @classmethod
    def for_config(cls, config: PreTrainedConfig) -> Self:
        """A collator with the padding token of a model's configuration, which has one."""
        return cls(config.get_text_config().pad_token_id)

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


#: Columns that losses know by another name, and the types of values of an example.
_VALUES = {
    "label": ("desirable", torch.bool),
    "labels": ("labels", torch.long),
    "margin": ("labels", torch.float32),
}


def row_columns(columns: Iterable[str]) -> list[str]:
    """The columns of examples whose ids become rows of a mini-batch, behind "prompt_ids" if there are some."""
    return [name for name in columns if name.endswith("_ids") and name != "prompt_ids"]


@dataclass(frozen=True)
class ExampleCollator(PairCollator):
    """Mini-batches of examples of one row or several, by the names of their columns.

    | column | in the mini-batch of N examples of k rows |
    |---|---|
    | `..._ids` | `input_ids`, `attention_mask` (N k, T): an example's rows are neighbours, in the order of columns |
    | `prompt_ids` | before the ids of each of its rows, which then have `labels` (N k, T), -100 in prompts |
    | `ref_..._logps` for each of those | `ref_logps` (N k,), in float64 |
    | any other, a number or a list of one | an entry (N k,), the same for all rows of the example |

    The entry of `label` is called `desirable`, and that of `margin` `labels`. Rows without a prompt have `labels` of 0,
    if no column gives them. A model that classifies rows finds the last token by `pad_token_id`.

    Attributes:
        max_length: tokens to which a prompt with its answer is cut; None: it is not.
        columns: those that are read, in this order, where the rows have them; None: all of the first row's.
    """

    max_length: int | None = None
    columns: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        first = rows[0].keys() if self.columns is None else [name for name in self.columns if name in rows[0]]
        names = row_columns(first)
        ids = [(row, row[name]) for row in rows for name in names]
        if "prompt_ids" in first:
            batch = self.of_answers([(row["prompt_ids"], own) for row, own in ids], self.max_length)
        else:
            batch = self.of_ids([own for _, own in ids]) | {"labels": torch.zeros(len(ids))}
        of_reference = [f"ref_{name.removesuffix('_ids')}_logps" for name in names]
        if of_reference[0] in first:
            values = [row[name] for row in rows for name in of_reference]
            batch["ref_logps"] = torch.tensor(values, dtype=torch.float64)
        for name in (name for name in first if name not in ("prompt_ids", *names, *of_reference)):
            entry, dtype = _VALUES.get(name, (name, None))
            given = torch.tensor([row[name] for row in rows], dtype=dtype)
            batch[entry] = given.view(-1).repeat_interleave(len(names))
        return batch


def tokens_of(batch: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """The tokens of each row of a mini-batch, without padding."""
    rows = zip(token_ids(batch), batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]
