"""Rows of any kind as they are read, and a corpus of them in three splits."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hf_gpipe.data.chats import text_of_message
from hf_gpipe.data.formats import Row
from hf_gpipe.data.splits import Corpus, read_splits
from hf_gpipe.recipe import DataSection

#: Columns with text or messages.
_TEXTS = ("messages", "prompt", "completion", "chosen", "rejected", "text", "texts", "answer")

Read = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""(a row's name in messages, the row) -> what is kept of it. Raises DataError for a row of an unknown form."""


class ReadRow(NamedTuple):
    """A row that was read: its name in messages, and its values as JSON, which take less memory than objects."""

    where: str
    text: str

    @classmethod
    def of(cls, where: str, row: Mapping[str, Any], read: Read) -> ReadRow:
        """A row of any form that `read` knows. Raises DataError."""
        return cls(where, json.dumps(read(where, row), ensure_ascii=False))

    @property
    def row(self) -> dict[str, Any]:
        """The result of `read`."""
        values: dict[str, Any] = json.loads(self.text)
        return values


def corpus_of_rows(
    data: DataSection,
    read: Read,
    what: str,
    evaluated: Collection[str] = ("validation", "test"),
) -> Corpus[ReadRow]:
    """The rows of local files, or of a data set of the Hub.

    `data.path` is a file, wildcards, or a directory with files whose names end in .jsonl, .json or .parquet, the first
    two perhaps in .gz; otherwise the Hub id of a data set, or a directory in its form.

    Args:
        data: the section, of a kind whose rows have a maximum length.
        read: of a row what is kept.
        what: the rows, in messages.
        evaluated: the splits to evaluate on. A data set's own others are not read: they may have no labels.

    Raises:
        DataError: no such files or data set, a row of another form, or none to train on.
    """

    def of_rows(rows: Iterable[Row]) -> Iterator[ReadRow]:
        return (ReadRow.of(where, row, read) for where, row in rows)

    return read_splits(
        data,
        of_rows=of_rows,
        text_of=lambda row: row.text,
        texts_of=_texts,
        what=what,
        evaluated=evaluated,
    )


def _texts(read: ReadRow) -> Iterator[str]:
    row = read.row
    for part in (row[name] for name in _TEXTS if name in row):
        yield from [part] if isinstance(part, str) else filter(None, map(text_of_message, part))
