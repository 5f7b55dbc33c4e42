"""Lines of a text file, plain or gzipped, and what goes wrong with files."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hf_gpipe.errors import DataError


@contextmanager
def text_of(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """The open file, gzipped where its name ends in ".gz"; `newline` as for open().

    Raises DataError, for what is read inside the `with` too, where the file cannot be read.
    """
    # utf-8-sig: a byte order mark at the start is no part of the first line.
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline=newline) as opened:
                yield opened
        else:
            with path.open(encoding="utf-8-sig", newline=newline) as opened:
                yield opened
    except FileNotFoundError as error:
        raise DataError(f"data file {path} does not exist (looked in {Path.cwd()}); correct `path`") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def numbered_lines(path: Path, newline: str | None = None) -> Iterator[tuple[int, str]]:
    """Every line with its number from 1. Raises DataError, for what is no UTF-8 too."""
    number = 0
    with text_of(path, newline) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line
        except UnicodeDecodeError as error:
            raise not_utf8(path, number, error) from error


def not_utf8(path: Path, last_line: int, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are no text, somewhere after line `last_line`."""
    return DataError(f"{path}, after line {last_line}: not UTF-8 ({error.reason}); convert the file")
