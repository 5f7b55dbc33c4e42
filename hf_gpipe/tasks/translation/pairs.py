"""Pairs of a source and a target text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

from hf_gpipe.data.prepared import BATCH_ROWS, in_blocks

ENGLISH = "en"


class Pair(NamedTuple):
    """A source and its translation. `source` includes its target tag, if there is one.

    `language` is that of the side that is not English, the key of reports per language. Pairs with equal `split_key`
    are always in the same split. The languages of the sides are empty where the data do not say them.
    """

    source: str
    target: str
    language: str
    split_key: str
    source_language: str = ""
    target_language: str = ""


class PairTable(Sequence[Pair]):
    """Pairs in an Arrow table, which may be much larger than memory if it is mapped from a file.

    Args:
        table: a table with the columns of `SCHEMA`.
        fingerprint: a hash of the content; None: nothing that is computed from the pairs is cached.
    """

    SCHEMA = pyarrow.schema([(name, pyarrow.string()) for name in Pair._fields])

    def __init__(self, table: pyarrow.Table, fingerprint: str | None = None) -> None:
        self.table, self.fingerprint = table, fingerprint

    @classmethod
    def batch_of(cls, pairs: Sequence[Pair]) -> pyarrow.RecordBatch:
        """Pairs as rows of such a table."""
        columns = [[getattr(pair, name) for pair in pairs] for name in cls.SCHEMA.names]
        return pyarrow.record_batch([pyarrow.array(column, pyarrow.string()) for column in columns], schema=cls.SCHEMA)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return Pair(*(column[index].as_py() for column in self.table.columns))

    def __iter__(self) -> Iterator[Pair]:
        for batch in self.table.to_batches(BATCH_ROWS):
            yield from map(Pair, *(column.to_pylist() for column in batch.columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list's


def texts_of(pair: Pair) -> tuple[str, str]:
    """The source and the target."""
    return pair.source, pair.target


def texts_in_blocks(pairs: Sequence[Pair]) -> Iterator[tuple[list[str], ...]]:
    """Sources, targets, the languages of sources and of targets of all pairs in order, a block at a time."""
    names = ("source", "target", "source_language", "target_language")
    if isinstance(pairs, PairTable):
        for batch in pairs.table.to_batches(BATCH_ROWS):
            yield tuple(batch.column(name).to_pylist() for name in names)
    else:
        for block in in_blocks(pairs):
            yield tuple([getattr(pair, name) for pair in block] for name in names)


def languages_of(pairs: Sequence[Pair]) -> list[str]:
    """The language of each pair."""
    if not isinstance(pairs, PairTable):
        return [pair.language for pair in pairs]
    # Share one string per language, instead of one per pair.
    known: dict[str, str] = {}
    batches = pairs.table.select(["language"]).to_batches(BATCH_ROWS)
    return [known.setdefault(name, name) for batch in batches for name in batch.column(0).to_pylist()]


def count_languages(pairs: Sequence[Pair]) -> Counter[str]:
    """How many pairs each language has."""
    if not isinstance(pairs, PairTable):
        return Counter(pair.language for pair in pairs)
    counted = pyarrow.compute.value_counts(pairs.table.column("language"))
    return Counter({entry["values"]: entry["counts"] for entry in counted.to_pylist()})


def language_tag(language: str) -> str:
    """The tag of a source whose target is in `language`: "<2de>"."""
    return f"<2{language}>"


def without_tag(source: str, language: str) -> str:
    """`source` without the tag of its target `language`, if it has one."""
    return source.removeprefix(f"{language_tag(language)} ")


def tagged(source: str, language: str) -> str:
    """`source` with the tag of its target `language`: "<2de> in three days"."""
    return f"{language_tag(language)} {source}"
