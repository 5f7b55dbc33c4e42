"""Conversations as token ids, with labels of the assistant's tokens: a map-style dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import IDS
from hf_gpipe.data.examples.chat_labels import ChatEncoder, ends_of_turns
from hf_gpipe.data.examples.chats import conversation_of
from hf_gpipe.data.examples.encoded import EncodedRows
from hf_gpipe.data.examples.rows import Read, ReadRow

logger = logging.getLogger(__name__)

#: Rows whose ends are looked at.
_LOOKED_AT = 16


class ChatExamples(EncodedRows):
    """A dataset of {"input_ids": [...], "labels": [...]}, one for each conversation that has a target.

    The labels are the ids of what the assistant says, its end of turn included, and -100 elsewhere. They are those of
    TRL's SFTTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: conversations in any form that `hf_gpipe.data.examples.chats.conversation_of` describes: a list, a
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
    _read: Read = staticmethod(conversation_of)

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
        if ends and not any(ends):
            logger.warning(
                "no target of the first %s ends in a special token, so the model does not learn to stop; give a chat "
                "template that writes the token which ends generation behind the assistant's text, within "
                "{%% generation %%} markers, in data.chat_template (in a script: processing_class.chat_template)",
                self._what,
            )

    def _example(self, read: ReadRow) -> tuple[np.ndarray, np.ndarray] | None:
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
        """The ids and labels of a row that `_read` returned."""
        ids, is_learnt = map(np.asarray, self._encoder.encode(where, row))
        return ids, np.where(is_learnt, ids, IGNORED_LABEL)

    def _is_kept(self, labels: np.ndarray) -> bool:
        """Whether there is a target: nothing predicts the first token."""
        return bool((labels[1:] != IGNORED_LABEL).any())
