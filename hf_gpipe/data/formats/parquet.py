"""Parquet: the rows of its row groups; columns may be nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from hf_gpipe.errors import DataError

T = TypeVar("T")
BATCH_ROWS = 1000


def read(path: Path, start: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row, as ("file, row 7", its values by column). Row groups before `start` are not read."""
    with _opened(path) as file:
        first = 0
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            if end > start:
                yield from _rows(path, file, group, first, start)
            first = end


def count(path: Path) -> int:
    """The rows, which the file's footer tells."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def _rows(
    path: Path, file: pyarrow.parquet.ParquetFile, group: int, first: int, start: int
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a row group, of which `first` stand before it in the file, from row `start` of the file on."""
    batches = file.iter_batches(batch_size=BATCH_ROWS, row_groups=[group])
    row = first
    while (batch := _guarded(path, lambda: next(batches, None))) is not None:
        skipped = max(0, min(start - row, batch.num_rows))
        for number, record in enumerate(_guarded(path, batch.slice(skipped).to_pylist), start=row + skipped + 1):
            yield f"{path}, row {number}", record
        row += batch.num_rows


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    if not path.exists():
        raise DataError(f"data file {path} does not exist (looked in {Path.cwd()}); correct `path`")
    return _guarded(path, lambda: pyarrow.parquet.ParquetFile(path))


def _guarded(path: Path, read_some: Callable[[], T]) -> T:
    try:
        return read_some()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data file {path} cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from error
