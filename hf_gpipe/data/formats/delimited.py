"""CSV and TSV: the first line names the columns, every value is text.

Commas and other signs part values that may stand in quotes (RFC 4180). Tabs part values that are taken as they are, for
tab-separated corpora do not quote: a sentence that starts with a quotation mark is just that. Values are never read as
numbers or as missing: "007" and "NA" are text.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from hf_gpipe.data.formats.text import not_utf8, text_of
from hf_gpipe.errors import DataError


def read(path: Path, start: int = 0, delimiter: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row, as ("file, line 7", its values by column); without a delimiter: a tab for .tsv, else a comma."""
    if delimiter is None:
        delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    quoting: Literal[0, 3] = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    with text_of(path, newline="") as opened:
        reader = csv.reader(opened, delimiter=delimiter, quoting=quoting, strict=True)
        try:
            yield from _rows(reader, path, start)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: no CSV ({error}); correct the line") from error
        except UnicodeDecodeError as error:
            raise not_utf8(path, reader.line_num, error) from error


def _rows(reader: Any, path: Path, start: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    columns: list[str] = next(reader, [])
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: the column {twice[0]!r} stands twice; the first line names the columns")
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
