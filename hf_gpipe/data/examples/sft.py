"""Rows of supervised fine-tuning as token ids: conversations, prompts with completions, texts, or ids as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.chat_examples import ChatExamples
from hf_gpipe.data.examples.chats import conversation_of
from hf_gpipe.data.examples.packed_rows import Piece, packed_rows
from hf_gpipe.data.fields import check_characters
from hf_gpipe.errors import DataError, UserError, listed

_FORMS = ("messages", "conversations", "completion")


class SFTExamples(ChatExamples):
    """A dataset of {"input_ids": [...], "labels": [...]}, with the tokens of TRL's SFTTrainer.

    Args:
        rows: mappings, with "messages"; "prompt" and "completion"; a text in `text_field`; or "input_ids" with, if they
            are there, "labels", "completion_mask" or "assistant_masks".
        tokenizer: as for `ChatExamples`; texts get an end-of-sequence token.
        max_length: tokens to which rows are cut, or of a packed row; None: they are not cut.
        truncation_mode: which end of a long row is kept.
        assistant_only_loss: whether only assistant turns are learnt.
        completion_only_loss: of a prompt and its completion, whether only the completion is learnt.
        text_field: the column of texts.
        packing: how rows are packed to `max_length` tokens, by data/examples/packed_rows.py; None: they are not. A
            packed row has also "seq_lengths", the tokens of each of its documents, unless they are "wrapped".
        shuffle_seed: of the order of the rows; None: their own.

    Raises:
        DataError: as for `ChatExamples`.
        UserError: packing without `max_length`, or by an unknown strategy.
    """

    _name = "sft"

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = 1024,
        truncation_mode: Literal["keep_start", "keep_end"] = "keep_start",
        assistant_only_loss: bool = False,
        completion_only_loss: bool = False,
        text_field: str = "text",
        packing: str | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
        if packing is not None and max_length is None:
            raise UserError("packing needs max_length, the tokens of a packed row")
        self._assistant_only, self._completion_only = assistant_only_loss, completion_only_loss
        self._text_field = text_field
        self._drops = packing is None and max_length is not None
        super().__init__(
            rows,
            tokenizer,
            max_length=max_length if packing is None else None,
            truncation_mode=truncation_mode,
            assistant_only_loss=assistant_only_loss,
            completion_only_loss=completion_only_loss,
        )
        self._row_lengths = super().lengths
        self._has_documents = packing not in (None, "wrapped")
        order = self._order(len(self._row_lengths), shuffle_seed)
        if packing is None:
            self._pieces: list[list[Piece]] = [[(row, 0, self._row_lengths[row])] for row in order]
        else:
            filled = packed_rows(order, self._row_lengths, max_length or 0, packing)
            self._pieces = [filled[number] for number in self._order(len(filled), shuffle_seed)]

    @staticmethod
    def _order(count: int, seed: int | None) -> list[int]:
        """The numbers of rows, shuffled as the library `datasets` does it."""
        return list(range(count)) if seed is None else np.random.default_rng(seed).permutation(count).tolist()

    def _read(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        if row.get("input_ids") is not None:
            return {"input_ids": _ints(row["input_ids"]), "labels": self._labels_of(row)}
        if any(row.get(name) is not None for name in _FORMS):
            conversation = conversation_of(where, row, needs_assistant=self._assistant_only)
            if self._assistant_only and isinstance(conversation.get("prompt"), str):
                raise DataError(f"{where} has no messages, which assistant_only_loss needs; leave it out")
            return conversation
        text = row.get(self._text_field)
        if not isinstance(text, str):
            raise DataError(
                f"{where} has none of 'messages', 'prompt' with 'completion', a text in {self._text_field!r} (see "
                f"dataset_text_field), and 'input_ids'; the columns found are {listed(list(map(str, row)))}"
            )
        if self._assistant_only:
            raise DataError(f"{where} has no messages, which assistant_only_loss needs; leave it out")
        check_characters(text, self._text_field, where)
        return {"text": text}

    def _labels_of(self, row: Mapping[str, Any]) -> list[int]:
        """Those of a row of token ids: its own, or the ids that its masks leave."""
        ids = _ints(row["input_ids"])
        if row.get("labels") is not None:
            return _ints(row["labels"])
        names = ["assistant_masks", *(["completion_mask"] if self._completion_only else [])]
        masks = [row[name] for name in names if row.get(name) is not None]
        if any(len(mask) != len(ids) for mask in masks):
            raise DataError(f"a row has {len(ids)} input_ids and a mask of another length; give one value for each")
        return [token if all(bits) else IGNORED_LABEL for token, *bits in zip(ids, *masks, strict=True)]

    def _tokens(self, where: str, row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        if "input_ids" not in row:
            return super()._tokens(where, row)
        if len(row["input_ids"]) != len(row["labels"]):
            raise DataError(
                f"{where} has {len(row['input_ids'])} input_ids and {len(row['labels'])} labels; give one for each"
            )
        return np.asarray(row["input_ids"], dtype=np.int64), np.asarray(row["labels"], dtype=np.int64)

    def _is_kept(self, labels: np.ndarray) -> bool:
        """As TRL does it: only rows that have lost their targets by being cut are left out."""
        return not self._drops or bool((labels != IGNORED_LABEL).any())

    def __len__(self) -> int:
        return len(self._pieces) if hasattr(self, "_pieces") else super().__len__()

    def _row(self, index: int) -> dict[str, list[int]]:
        example: dict[str, list[int]] = {name: [] for name in self.columns}
        for row, start, stop in self._pieces[index]:
            for name, values in super()._row(row).items():
                example[name] += values[start:stop]
        if self._has_documents:
            example["seq_lengths"] = [stop - start for _, start, stop in self._pieces[index]]
        return example

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each example."""
        return [sum(stop - start for _, start, stop in pieces) for pieces in self._pieces]


@dataclass(frozen=True)
class SFTCollator(PairCollator):
    """Mini-batches of {"input_ids", "labels"}, padded on the right as by `PairCollator`, or flattened.

    Attributes:
        padding_free: whether a mini-batch is one row of documents, (1, T), with position_ids that begin anew in each. A
            row with "seq_lengths" has several of them.
    """

    padding_free: bool = False

    def __call__(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        if not self.padding_free:
            return super().__call__([{"labels": list(row["input_ids"]), **row} for row in rows])
        lengths = [length for row in rows for length in row.get("seq_lengths", [len(row["input_ids"])])]
        columns = {
            "input_ids": [token for row in rows for token in row["input_ids"]],
            "position_ids": [place for length in lengths for place in range(length)],
            "labels": [token for row in rows for token in row.get("labels", row["input_ids"])],
        }
        return {name: torch.tensor([values]) for name, values in columns.items()}


def _ints(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]
