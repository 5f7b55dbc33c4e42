"""Readers of local files: each yields its rows with the file and the line, starting at any row.

The loaders of `datasets` are not used here, because they change text silently: their JSON reader turns the text
"2023-05-03" into a date and the number 1 into the text "1", their CSV reader pads a short line and shifts the values of
a file whose lines are all too long, and their text reader ends a line at a lone carriage return. These readers change
nothing, and raise an error that names the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeVar

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from hf_gpipe import strict_json
from hf_gpipe.errors import DataError, one_line

Row = tuple[str, Mapping[str, Any]]
"""A row's name in messages, such as "pairs.jsonl, line 7", and its values by name."""

#: The fields of a row of two line-aligned files.
SOURCE, TARGET = "source", "target"

T = TypeVar("T")
_BATCH_ROWS = 1000
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
#: Characters of a line, or of a value of CSV with line breaks, which is in memory as a whole.
_LONGEST_LINE = 1 << 24
#: Characters that a gzipped file with one JSON array, which is in memory as a whole, may unpack to.
_LONGEST_ARRAY = 1 << 28
_BLOCK = 1 << 20
#: Text that is packed more tightly than this, after so many bytes, is a bomb: gzip packs zeros 1 to 1000, prose 1 to 4.
_MOST_PACKED, _MAY_BE_PACKED_BYTES = 100, 1 << 24


# ---- lines


@contextmanager
def text_of(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Context manager that opens a text file, gzipped if its name ends in ".gz"; `newline` as for open().

    Raises DataError if the file cannot be read, also for reads inside the `with`.
    """
    # utf-8-sig: a byte order mark at the start does not belong to the first line.
    try:
        if path.suffix == ".gz":
            with (
                path.open("rb") as packed,
                io.TextIOWrapper(
                    io.BufferedReader(_Unpacked(packed, path)), encoding="utf-8-sig", newline=newline
                ) as opened,
            ):
                yield opened
        else:
            with path.open(encoding="utf-8-sig", newline=newline) as opened:
                yield opened
    except FileNotFoundError as error:
        raise DataError(f"data file {path} does not exist (looked in {Path.cwd()}); correct `path`") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}); convert the file") from error


class _Unpacked(io.RawIOBase):
    """The content of a gzipped file, until it is seen to be a bomb: a small file that unpacks to fill any memory."""

    def __init__(self, packed: BinaryIO, path: Path) -> None:
        self._packed, self._content, self._path, self._size = packed, gzip.GzipFile(fileobj=packed), path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._content.readinto(buffer)
        self._size += count
        if self._size > _MAY_BE_PACKED_BYTES and self._size > _MOST_PACKED * self._packed.tell():
            raise DataError(
                f"data file {self._path} unpacks to more than {_MOST_PACKED} times its size, which no text does; if it "
                "is meant, unpack it before"
            )
        return count


def lines_of(opened: TextIO, path: Path) -> Iterator[str]:
    """The lines of an open file. Raises DataError for one that is too long, or for bytes that are not UTF-8."""
    number = 0
    try:
        while line := opened.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise DataError(f"{path}, line {number} has more than {_LONGEST_LINE} characters; divide it")
            yield line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, after line {number}, is not UTF-8 ({error.reason}); convert the file") from error


def numbered_lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Every line with its number from 1. Raises DataError if the file cannot be read or is not UTF-8."""
    with text_of(path, newline) as opened:
        yield from enumerate(lines_of(opened, path), start=1)


# ---- JSON Lines


def read_jsonl(path: Path, start: int = 0) -> Iterator[Row]:
    """Each line that is not blank, as ("file, line 7", the object on it)."""
    row, name = 0, str(path)
    for number, line in numbered_lines(path):
        text = line.strip()
        if not text:
            continue
        row += 1
        if row > start:
            where = f"{name}, line {number}"
            yield where, _object(text, where)


def _decoded(text: str, place: int) -> tuple[Any, int]:
    """The JSON value at a place and where it ends. Raises ValueError or RecursionError."""
    # Takes half the time of json.loads.
    value, end = _DECODER.raw_decode(text, place)
    # What is nested deeper could not be written again, which conversations are.
    if text.count("[", place, end) + text.count("{", place, end) > strict_json.DEEPEST and strict_json.is_deeper(value):
        raise RecursionError(f"more than {strict_json.DEEPEST} levels of lists and mappings")
    return value, end


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value, end = _decoded(text, 0)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}); write one object per line"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets by the thousand
        raise DataError(f"{where} is JSON that cannot be read ({error}); write one object per line") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a JSON {type(value).__name__}; write an object, {{...}}")
    return value


def read_json(path: Path, start: int = 0) -> Iterator[Row]:
    """The entries of a JSON array, as ("file, entry 7", the object); a file of another form is read as JSON Lines."""
    with text_of(path) as opened:
        is_array = opened.read(1024).lstrip().startswith("[")
    if not is_array:
        yield from read_jsonl(path, start)
        return
    with text_of(path) as opened:
        most = max(_LONGEST_ARRAY, path.stat().st_size)
        # In blocks: one read takes the memory that it is allowed to fill, not what there is.
        text = "".join(islice(iter(partial(opened.read, _BLOCK), ""), most // _BLOCK + 2))
    brackets = text.count("[") + text.count("{")
    if len(text) > most or (brackets > strict_json.MOST_VALUES and brackets * 8 > len(text)):
        raise DataError(f"{path} is a JSON array that is too large to be read at once; write one object per line")
    for number, entry in enumerate(_entries(text, path), start=1):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise DataError(f"{where} is a JSON {type(entry).__name__}; write an object, {{...}}")
        if number > start:
            yield where, entry


def _entries(text: str, path: Path) -> Iterator[Any]:
    """The entries of a JSON array, one at a time: all of them take twenty times the memory of the text."""
    place, number = _after_space(text, text.index("[") + 1), 0
    is_first = True
    while not (is_first and text[place : place + 1] == "]"):
        number += 1
        try:
            entry, place = _decoded(text, place)
            place = _after_space(text, place)
            if text[place : place + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path} is not a JSON array (entry {number}: {error}); correct it, or write one object per line"
            ) from error
        yield entry
        is_first = False
        if text[place] == "]":
            break
        place = _after_space(text, place + 1)
    if end := text[_after_space(text, place + 1) :][:20]:
        raise DataError(
            f"{path} is not a JSON array ({end!r} stands after it); correct it, or write one object per line"
        )


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return place if space is None else space.end()


# ---- CSV and TSV


def read_csv(path: Path, start: int = 0, delimiter: str | None = None) -> Iterator[Row]:
    """Each row, as ("file, line 7", its values by column); without a delimiter: a tab for .tsv, else a comma."""
    if delimiter is None:
        delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    # The limit of the module is one for the process, and low. It is never lowered: another thread may be reading.
    csv.field_size_limit(most := max(csv.field_size_limit(), _LONGEST_LINE))
    with text_of(path, newline="") as opened:
        reader = csv.reader(lines_of(opened, path), delimiter=delimiter, quoting=quoting, strict=True)
        try:
            yield from _csv_rows(reader, path, start)
        except csv.Error as error:
            if "field limit" in str(error):
                raise DataError(
                    f"{path}, line {reader.line_num}: a value has more than {most} characters; divide it, or correct "
                    "the quotes"
                ) from error
            raise DataError(f"{path}, line {reader.line_num} is not CSV ({error}); correct the line") from error


def _csv_rows(reader: Any, path: Path, start: int) -> Iterator[Row]:
    columns: list[str] = next(reader, [])
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: the column {twice[0]!r} is given twice; the first line names the columns")
    row = 0
    for values in reader:
        if not values:
            continue
        row += 1
        if row <= start:
            continue
        where = f"{path}, line {reader.line_num}"
        if len(values) != len(columns):
            raise DataError(
                f"{where}: the number of values is {len(values)}, and the first line names {len(columns)} columns "
                f"({', '.join(columns)[:60]}); correct the line, or data.delimiter"
            )
        yield where, dict(zip(columns, values, strict=True))


# ---- Parquet


def read_parquet(path: Path, start: int = 0) -> Iterator[Row]:
    """Each row, as ("file, row 7", its values by column). Row groups before `start` are not read."""
    with _opened(path) as file:
        row, groups = 0, list(range(file.num_row_groups))
        while groups and row + file.metadata.row_group(groups[0]).num_rows <= start:
            row += file.metadata.row_group(groups.pop(0)).num_rows
        batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups)
        while (batch := _guarded(path, lambda: next(batches, None))) is not None:
            skipped = max(0, min(start - row, batch.num_rows))
            for number, record in enumerate(_guarded(path, batch.slice(skipped).to_pylist), start=row + skipped + 1):
                yield f"{path}, row {number}", record
            row += batch.num_rows


def count_parquet(path: Path) -> int:
    """The number of rows, from the file's footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    if not path.exists():
        raise DataError(f"data file {path} does not exist (looked in {Path.cwd()}); correct `path`")
    return _guarded(path, lambda: pyarrow.parquet.ParquetFile(path))


def _guarded(path: Path, read_some: Callable[[], T]) -> T:
    try:
        return read_some()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data file {path} cannot be read as Parquet: {one_line(str(error), 200)}") from error


# ---- line-aligned text


def read_parallel(path: Path, start: int = 0, *, target_path: Path) -> Iterator[Row]:
    """Each line with the target's line of the same number, as ("file, line 7", {"source": ..., "target": ...}).

    Raises DataError at the end of the shorter file if the other one has more lines; the message has both numbers.
    """
    # A carriage return inside a line does not end it: it would do so on one side only.
    sources, targets = numbered_lines(path, "\n"), numbered_lines(target_path, "\n")
    for number, (source, target) in enumerate(zip_longest(sources, targets), start=1):
        if source is None or target is None:
            more = 1 + sum(1 for _ in (targets if source is None else sources))
            counts = [number - 1, number - 1 + more]
            of_source, of_target = counts if source is None else reversed(counts)
            raise DataError(
                f"{path} has {of_source} lines and {target_path} has {of_target}; the lines of one must be the "
                "translations of the other's, so give files with equally many"
            )
        if number > start:
            yield f"{path}, line {number}", {SOURCE: source[1].rstrip("\r\n"), TARGET: target[1].rstrip("\r\n")}


# ---- paragraphs


def read_paragraphs(path: Path, field: str) -> Iterator[Row]:
    """Each paragraph, lines up to a blank one, as ("file, line 7", {field: its text})."""
    for is_blank, some in groupby(numbered_lines(path), key=lambda numbered: not numbered[1].strip()):
        if not is_blank:
            first, line = next(some)
            yield f"{path}, line {first}", {field: "".join([line, *(line for _, line in some)]).rstrip("\r\n")}


# ---- any of these


def rows_of_file(path: Path, suffixes: Sequence[str], what: str, text_field: str) -> Iterator[Row]:
    """The rows of a file in the form that the end of its name tells.

    Args:
        path: the file.
        suffixes: the ends of names that are read.
        what: the rows, for the message.
        text_field: the field that a paragraph of a .txt file is in.

    Raises:
        DataError: the name ends otherwise, or the file cannot be read.
    """
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".txt": partial(read_paragraphs, field=text_field),
        ".jsonl": read_jsonl,
        ".json": read_json,
        ".parquet": read_parquet,
    }
    allowed = {suffix: read for suffix, read in readers.items() if suffix in suffixes}
    for suffix, read in allowed.items():
        if path.name.removesuffix(".gz").endswith(suffix):
            return read(path)
    *most, last = allowed
    raise DataError(f"data.path: {path} has no {what}; names that end in {', '.join(most)} or {last} are read")
