"""Preferences for a reward model: conversations with a chosen and a rejected answer, neighbours in mini-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chats import preference_of
from hf_gpipe.data.examples.preferences import PreferenceExamples
from hf_gpipe.data.examples.rows import ReadRow
from hf_gpipe.errors import DataError


def compared_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of preferences as `preference_of` reads it, where the prompt may be empty, with its "margin", if any.

    Raises:
        DataError: as `preference_of`, or a margin that is no finite number; names the row and the column.
    """
    pair, margin = preference_of(where, row, needs_prompt=False), row.get("margin")
    if margin is None:
        return pair
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"{where}: 'margin' is {margin!r}; it must be a number")
    return pair | {"margin": float(margin)}


class RewardExamples(PreferenceExamples):
    """A dataset of {"chosen_ids": [...], "rejected_ids": [...], "margin": [m]}, where m is 0 if a row has none.

    The ids are those of TRL's RewardTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: preferences as `compared_of` reads them, or the split of a corpus that it has read.
        tokenizer: as for `PreferenceExamples`.
        max_length: tokens of a prompt with its answer; pairs with a longer one are dropped, and `num_dropped` counts
            them. None: there is no limit.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, columns, _numbers = "rewards", ("chosen_ids", "rejected_ids", "margin"), ("margin",)
    _dropped = "they are longer"
    _read = staticmethod(compared_of)

    def _example(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
        row = read.row
        wholes = self._answered(read.where, row)
        self._check_tokens(read.where, "an answer", *wholes)
        if self._max_length is not None and max(map(len, wholes)) > self._max_length:
            self.num_dropped += 1
            return None
        return *wholes, [row.get("margin", 0.0)]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the longer answer of each example with its prompt, for length bucketing."""
        both = (self._lengths_of(name) for name in ("chosen_ids", "rejected_ids"))
        return [max(pair) for pair in zip(*both, strict=True)]


class RewardCollator(PairCollator):
    """Mini-batches of {"chosen_ids", "rejected_ids", "margin"}: each chosen row is followed by its rejected one.

    Returns input_ids and attention_mask (2 N, T), padded on the right, and labels (2 N,) in float32, the margin of the
    pair in chosen rows and 0 in the others. `pad_token_id` must be that of the model's configuration, by which the
    model finds the last token of each row.
    """

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self.of_ids([row[name] for row in rows for name in ("chosen_ids", "rejected_ids")])
        margins = torch.tensor([row.get("margin", 0.0) for row in rows], dtype=torch.float32).view(-1, 1)
        return batch | {"labels": torch.nn.functional.pad(margins, (0, 1)).flatten()}
