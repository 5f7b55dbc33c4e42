"""Conversations, prompts with completions, and texts as token ids with labels: datasets, and their collator."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import IDS
from hf_gpipe.data.chat_labels import ChatEncoder, ends_of_turns
from hf_gpipe.data.chats import conversation_of
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.encoded import EncodedRows
from hf_gpipe.data.fields import check_characters
from hf_gpipe.data.packed_rows import Piece, packed_rows
from hf_gpipe.data.rows import Read, ReadRow
from hf_gpipe.errors import DataError, UserError, listed

logger = logging.getLogger(__name__)

#: Rows whose ends are looked at.
_LOOKED_AT = 16


class ChatExamples(EncodedRows):
    """A dataset of {"input_ids": [...], "labels": [...]}, one for each conversation that has a target.

    The labels are the ids of what the assistant says, its end of turn included, and -100 elsewhere. They are those of
    TRL's SFTTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: conversations in any form that `hf_gpipe.data.chats.conversation_of` describes: a list, a
            `datasets.Dataset`, or the split of a corpus.
        tokenizer: its chat template is applied to messages. A prompt and a completion that are text are joined as they
            are, with an end-of-sequence token behind them.
        max_length: tokens to which conversations are cut; None: they are not. Those without a target in what is left
            are dropped; `num_dropped` and `num_truncated` count them, and they are logged.
        truncation_mode: which end of a long conversation is kept.
        assistant_only_loss: whether only assistant turns are learnt, or everything.
        completion_only_loss: of a prompt and its completion, whether only the completion is learnt.

    Raises:
        DataError: a row that is not a conversation or that the template refuses, a tokenizer without a template, or no
            example with a target.
    """

    _name = "chats"
    read: Read = staticmethod(conversation_of)

    def __init__(
        self,
        rows: Iterable[ReadRow | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = 1024,
        truncation_mode: Literal["keep_start", "keep_end"] = "keep_start",
        assistant_only_loss: bool = True,
        completion_only_loss: bool = True,
    ) -> None:
        learnt = {"assistant_only": assistant_only_loss, "completion_only": completion_only_loss}
        self._encoder = ChatEncoder(tokenizer, **learnt)
        self._kept = slice(max_length) if truncation_mode == "keep_start" else slice(-(max_length or 0), None)
        options = (truncation_mode, assistant_only_loss, completion_only_loss)
        super().__init__(rows, tokenizer, max_length=max_length, options=options)
        self._warn_without_ends()

    def _warn_without_ends(self) -> None:
        """Warn if no target of the first rows ends in a special token: then nothing teaches the model to stop."""
        first = (super(ChatExamples, self)._row(index) for index in range(min(_LOOKED_AT, self._table.num_rows)))
        ends: list[bool] = []
        for row in first:
            ids, is_learnt = (np.asarray(row[IDS]), np.asarray(row["labels"]) != IGNORED_LABEL)
            if not is_learnt.all() and len(ids) != self._max_length:
                ends += ends_of_turns(self._tokenizer, ids, is_learnt)
        if self._is_told and ends and not any(ends):
            logger.warning(
                "no target of the first %s ends in a special token, so the model does not learn to stop; give a chat "
                "template that writes the token which ends generation behind the assistant's text, within "
                "{%% generation %%} markers, in data.chat_template (in a script: processing_class.chat_template)",
                self._what,
            )

    def encode(self, read: ReadRow) -> tuple[np.ndarray, np.ndarray] | None:
        """The ids and labels of a conversation; None if no target is left."""
        ids, labels = self._tokens(read.where, read.row)
        is_cut = self._max_length is not None and len(ids) > self._max_length
        ids, labels = (ids[self._kept], labels[self._kept]) if is_cut else (ids, labels)
        self.num_truncated += is_cut
        if not self._is_kept(labels):
            self.num_dropped += 1
            return None
        return ids, labels

    def _tokens(self, where: str, row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The ids and labels of a row that `read` returned."""
        ids, is_learnt = map(np.asarray, self._encoder.encode(where, row))
        return ids, np.where(is_learnt, ids, IGNORED_LABEL)

    def _is_kept(self, labels: np.ndarray) -> bool:
        """Whether there is a target: nothing predicts the first token."""
        return bool((labels[1:] != IGNORED_LABEL).any())


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
        packing: how rows are packed to `max_length` tokens, by data/packed_rows.py; None: they are not. A
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

    def read(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
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
