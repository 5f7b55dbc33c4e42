"""Values, numbers and tables as text for people."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from itertools import groupby
from types import NoneType
from typing import Any

_COUNTS = (("B", 10**9), ("M", 10**6), ("k", 10**3))
_WORDS: dict[type, str] = {
    NoneType: "null",
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def seconds_text(seconds: float) -> str:
    """A time: "1.23 s", "45.6 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{1000 * seconds:.3g} ms"


def size_text(size_bytes: float) -> str:
    """A size in memory: "11.3 GiB", "512 KiB", "0 B"."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if abs(size) >= 100 else f"{size:.3g} {unit}"


def bytes_text(size_bytes: float) -> str:
    """A size of a message, in decimal units as the rates of links: "1.25 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.3g} {unit}"
    return f"{size_bytes:.3g} B"


def count_text(number: int, form: str = ".4g") -> str:
    """A number of parameters: "282.2M", in the given form."""
    for unit, size in _COUNTS:
        if number >= size:
            return f"{number / size:{form}}{unit}"
    return str(number)


def table_text(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> str:
    """Rows of cells as lines whose columns stand below each other.

    Args:
        rows: of equal length; the first may be a header.
        left: numbers of the columns whose cells begin at the left; those of the others end at the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in cells).rstrip())
    return "\n".join(lines)


def show(value: Any) -> str:
    """A value and its type, for a message: "'two' (a string)"."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    text = shorten(repr(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f"{text} (not a finite number)"
    return f"{text} ({_WORDS.get(type(value), type(value).__name__)})"


def shorten(text: str, most: int = 60) -> str:
    """The start of a text that is longer than `most` characters, for a message."""
    return text if len(text) <= most else text[: most - 3] + "..."


def runs_text(entries: Sequence[Any]) -> str:
    """A list with its repetitions counted: [3, 3, 2] is "2 x 3, 2"."""
    runs = [(entry, len(list(group))) for entry, group in groupby(entries)]
    return "[" + ", ".join(f"{count} x {entry}" if count > 1 else str(entry) for entry, count in runs) + "]"
