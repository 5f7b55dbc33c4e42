"""Rows as columns of token ids: a map-style dataset, kept in the cache of `datasets`."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.text_entries import IDS, token_ids
from hf_gpipe.data.collate import ExampleCollator, PairCollator, row_columns
from hf_gpipe.data.prepared import BATCH_ROWS, cached_table, fingerprint, in_blocks
from hf_gpipe.data.rows import Read, ReadRow
from hf_gpipe.data.stream import Block
from hf_gpipe.data.tokenizer import identity_of_tokenizer
from hf_gpipe.errors import DataError
from hf_gpipe.progress import progress

logger = logging.getLogger(__name__)


class Columns(ABC):
    """Rows by number, and their columns as the library `datasets` has them: by name, and of a slice of rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _row(self, index: int) -> dict[str, Any]:
        """The row of a number from 0 to the length."""

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return list(self._row(0)) if len(self) else []

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return [self._row(number)[index] for number in range(len(self))]
        if isinstance(index, slice):
            rows = [self._row(number) for number in range(*index.indices(len(self)))]
            return {name: [row[name] for row in rows] for name in self.column_names}
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        return self._row(number)


class SeveralDatasets(Columns):
    """Several datasets as one, their rows one after the other; a mini-batch has rows of one of them.

    Args:
        datasets: each by its name.
        in_turn: whether the datasets give mini-batches in turn until one of them has no other; False: all of them are
            drawn, in random order.
    """

    def __init__(self, datasets: Mapping[str, Any], *, in_turn: bool = False) -> None:
        self.datasets, self.in_turn = dict(datasets), in_turn
        #: The number of the first row of each dataset, and that of all rows.
        self.starts = [0, *accumulate(map(len, self.datasets.values()))]

    def __len__(self) -> int:
        return self.starts[-1]

    def _row(self, index: int) -> dict[str, Any]:
        number = bisect(self.starts, index) - 1
        row: dict[str, Any] = [*self.datasets.values()][number][index - self.starts[number]]
        return row

    @property
    def lengths(self) -> list[int]:
        """The lengths of the rows of all datasets."""
        return [length for dataset in self.datasets.values() for length in dataset.lengths]


class EncodedRows(Columns):
    """A dataset of one dict of lists of token ids for each row that is kept.

    Args:
        rows: those of a corpus, or plain ones, which `read` reads. The examples of a `Block` of a stream are in memory
            alone, and there may be none.
        tokenizer: has a chat template, if the rows have messages.
        max_length: tokens to which a row is cut; None: it is not.
        options: JSON values on which the examples depend besides.

    Attributes:
        num_truncated: how many rows were cut.
        num_dropped: how many were left out, because nothing to learn was left of them.

    Raises:
        DataError: a row of another form, messages and a tokenizer without a template, or no row that is kept.
    """

    #: Of an entry of the cache.
    _name: str
    #: The rows, and why some are dropped, in messages; empty: none is.
    _what, _dropped = "conversations", "they then had no target"
    #: The entries of an example. Rows of ids that come from elsewhere are known by the first one.
    columns: tuple[str, ...] = (IDS, "labels")
    #: Of the columns, those of numbers that are no ids.
    _numbers: tuple[str, ...] = ()
    #: What is kept of a plain row.
    read: Read
    #: Whether a trainer also takes rows of these columns from elsewhere.
    takes_ids = True
    #: The class of what makes mini-batches of examples.
    collator: ClassVar[type[PairCollator]] = ExampleCollator

    def __init__(
        self,
        rows: Iterable[ReadRow | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = 1024,
        options: Sequence[Any] = (),
    ) -> None:
        if self._dropped and max_length is not None and max_length < 2:
            raise DataError(f"max_length is {max_length}; it must be at least 2, for a target and a token before it")
        self._tokenizer, self._max_length = tokenizer, max_length
        read = self._read_all(rows)
        has_messages = any('"role"' in row.text for row in read)
        if has_messages and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; give a file with one in "
                "data.chat_template, or the tokenizer of a chat model in tokenizer.path"
            )
        digest = hashlib.blake2b(digest_size=16)
        for row in read:
            digest.update(f"{row.text}\n".encode())
        key = fingerprint(self._name, digest.hexdigest(), identity_of_tokenizer(tokenizer), [max_length, *options])
        kinds = [pyarrow.float64() if name in self._numbers else pyarrow.int32() for name in self.columns]
        schema = pyarrow.schema([*zip(self.columns, map(pyarrow.list_, kinds), strict=True)])
        self.num_truncated = self.num_dropped = 0
        batches = self._batches(read, schema)
        if isinstance(rows, Block):
            self._table = pyarrow.Table.from_batches(batches, schema)
        else:
            self._table, (self.num_truncated, self.num_dropped) = cached_table(
                self._name, key, schema, batches, lambda: (self.num_truncated, self.num_dropped)
            )
        self._is_told = rows.is_first if isinstance(rows, Block) else True
        count, what, why = len(read), self._what, self._dropped
        if self._dropped and not self._table.num_rows and not isinstance(rows, Block):
            raise DataError(
                f"of {count} {what} none is left in {max_length} tokens: {self.num_dropped} were dropped because "
                f"{why}; raise max_length, or give other rows"
            )
        if self._is_told and (self.num_truncated or self.num_dropped):
            dropped = f", and {self.num_dropped} were dropped because {why}" if why else ""
            logger.warning("of %d %s, %d were cut to %s tokens%s", count, what, self.num_truncated, max_length, dropped)

    def _read_all(self, rows: Iterable[ReadRow | Mapping[str, Any]]) -> list[ReadRow]:
        """The rows as they are encoded, one for each example."""
        return [
            row if isinstance(row, ReadRow) else ReadRow.of(f"row {number}", row, self.read)
            for number, row in enumerate(rows)
        ]

    @abstractmethod
    def encode(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float] | np.ndarray, ...] | None:
        """The columns of a row, which it counts in `num_truncated` or `num_dropped`; None drops it."""

    def _cut(self, where: str, texts: list[str]) -> list[list[int]]:
        """The ids of the texts of a row, cut by the tokenizer itself, which knows where special tokens stand."""
        rows = [list(token_ids(self._tokenizer(text, verbose=False))) for text in texts]
        if self._max_length is not None and max(map(len, rows)) > self._max_length:
            self.num_truncated += 1
            cut = self._tokenizer(texts, truncation=True, max_length=self._max_length)
            rows = [list(ids) for ids in token_ids(cut)]
        if not all(rows):
            raise DataError(f"{where}: the tokenizer leaves no tokens of a text; leave the row out")
        return rows

    def _batches(self, read: list[ReadRow], schema: pyarrow.Schema) -> Iterator[pyarrow.RecordBatch]:
        with progress(None, "tokenising", self._what, len(read)) as shown:
            for block in in_blocks(read, BATCH_ROWS):
                rows = [row for row in map(self.encode, block) if row is not None]
                if rows:
                    columns = [pyarrow.array(*pair) for pair in zip(zip(*rows, strict=True), schema.types, strict=True)]
                    yield pyarrow.record_batch(columns, schema=schema)
                shown.update(len(block))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def _row(self, index: int) -> dict[str, list[int]]:
        columns = zip(self.columns, self._table.columns, strict=True)
        return {name: column[index].as_py() for name, column in columns}

    @property
    def row_columns(self) -> list[str]:
        """The columns whose ids become rows of a mini-batch."""
        return row_columns(self.columns)

    def _lengths_of(self, name: str) -> list[int]:
        """The number of tokens in a column of each example."""
        lengths: list[int] = pyarrow.compute.list_value_length(self._table.column(name)).to_numpy().tolist()
        return lengths

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of the longest row of each example with its prompt, for length bucketing."""
        longest = [max(own) for own in zip(*map(self._lengths_of, self.row_columns), strict=True)]
        if "prompt_ids" not in self.columns:
            return longest
        return [a + b for a, b in zip(self._lengths_of("prompt_ids"), longest, strict=True)]
