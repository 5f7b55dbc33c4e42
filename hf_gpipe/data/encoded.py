"""Conversations as columns of token ids: a map-style dataset, kept in the cache of `datasets`."""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.chats import Conversation, Read
from hf_gpipe.data.progress import progress
from hf_gpipe.data.store import BATCH_ROWS, cached, fingerprint, in_blocks, read_counts, read_table, write_table
from hf_gpipe.data.tokenizer import identity_of_tokenizer
from hf_gpipe.errors import DataError

logger = logging.getLogger(__name__)


class EncodedConversations(ABC):
    """A dataset of one dict of lists of token ids for each conversation that is kept.

    Attributes:
        num_truncated: how many conversations were cut.
        num_dropped: how many were left out, because nothing to learn was left of them.
    """

    #: Of an entry of the cache.
    _name: str
    #: The rows, and why some are dropped, in messages.
    _what, _dropped = "conversations", "they then had no target"
    _columns: tuple[str, ...]
    #: Of the columns, those of numbers that are no ids.
    _numbers: tuple[str, ...] = ()
    num_truncated: int
    num_dropped: int

    @abstractmethod
    def _example(self, conversation: Conversation) -> tuple[Sequence[int] | np.ndarray, ...] | None:
        """The columns of a conversation, which it counts in `num_truncated` or `num_dropped`; None drops it."""

    def _encode(
        self,
        conversations: list[Conversation],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None,
        *options: Any,
    ) -> None:
        """Make the examples, or find them in the cache; log how many were cut or dropped.

        Args:
            conversations: the rows.
            tokenizer: of the examples.
            max_length: tokens to which a conversation is cut.
            options: JSON values on which the examples depend besides.
        """
        digest = hashlib.blake2b(digest_size=16)
        for conversation in conversations:
            digest.update(f"{conversation.text}\n".encode())
        key = fingerprint(self._name, digest.hexdigest(), identity_of_tokenizer(tokenizer), [max_length, *options])
        folder = cached(self._name, key, lambda folder: self._write(folder, conversations))
        self._table = read_table(folder / "tokens.arrow")
        self.num_truncated, self.num_dropped = read_counts(folder / "counts.json")
        if self.num_truncated or self.num_dropped:
            dropped = f", and {self.num_dropped} were dropped because {self._dropped}" if self._dropped else ""
            counts = (len(conversations), self._what, self.num_truncated, max_length, dropped)
            logger.warning("of %d %s, %d were cut to %s tokens%s", *counts)

    def _write(self, folder: Path, conversations: list[Conversation]) -> None:
        self.num_truncated = self.num_dropped = 0
        kinds = [pyarrow.float64() if name in self._numbers else pyarrow.int32() for name in self._columns]
        schema = pyarrow.schema([*zip(self._columns, map(pyarrow.list_, kinds), strict=True)])
        write_table(folder / "tokens.arrow", schema, self._batches(conversations, schema))
        (folder / "counts.json").write_text(json.dumps([self.num_truncated, self.num_dropped]))

    def _batches(self, conversations: list[Conversation], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        with progress(None, "tokenising", self._what, len(conversations)) as shown:
            for block in in_blocks(conversations, BATCH_ROWS):
                rows = [row for row in map(self._example, block) if row is not None]
                if rows:
                    columns = [pyarrow.array(*pair) for pair in zip(zip(*rows, strict=True), schema.types, strict=True)]
                    yield pyarrow.record_batch(columns, schema=schema)
                shown.update(len(block))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._row(index)

    def _row(self, index: int) -> dict[str, list[int]]:
        columns = zip(self._columns, self._table.columns, strict=True)
        return {name: column[index].as_py() for name, column in columns}

    def _lengths_of(self, name: str) -> np.ndarray:
        """The number of tokens in a column of each example."""
        counts: np.ndarray = pyarrow.compute.list_value_length(self._table.column(name)).to_numpy()
        return counts


def conversations_of(
    rows: Iterable[Conversation | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    read: Read | None = None,
) -> list[Conversation]:
    """Rows as conversations.

    Args:
        rows: those of a corpus, or plain ones.
        tokenizer: has a chat template, if the rows have messages.
        read: of a plain row what is kept; None: `conversation_of`.

    Raises:
        DataError: a row of another form, or messages and a tokenizer without a template.
    """
    conversations = [
        row if isinstance(row, Conversation) else Conversation.of(f"row {number}", row, read)
        for number, row in enumerate(rows)
    ]
    has_messages = any('"role"' in conversation.text for conversation in conversations)
    if has_messages and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give a file with one in "
            "data.chat_template, or the tokenizer of a chat model in tokenizer.path"
        )
    return conversations
