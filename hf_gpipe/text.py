"""Values, numbers and tables as text for people."""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterable, Sequence
from html import escape
from itertools import groupby
from types import NoneType
from typing import Any, TextIO

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


#: Colours of a terminal.
RED, GREEN, YELLOW = 31, 32, 33


def coloured(text: str, colour: int, stream: TextIO) -> str:
    """Bold text in a colour, where the stream it is written to is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[1;{colour}m{text}\033[0m"


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


_STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.good, .bad { padding: .6rem 1rem; border-left: .4rem solid #2a7f62; background: #eef7f3 }
.bad { border-color: #b0413e; background: #fbeeee }
svg { width: 100%; height: auto } .wide { overflow-x: auto } .wide svg { min-width: 34rem }
pre { font-size: .8rem; overflow-x: auto } td, th { padding: .2rem 1rem .2rem 0; text-align: left }"""


def html_page(title: str, summary: str, parts: Iterable[tuple[str, str]], *, is_good: bool = True) -> str:
    """A page that needs no other file and no server.

    Args:
        title: of the page.
        summary: a sentence, in green or red.
        parts: headings, each with the HTML below it.
        is_good: whether the summary is green.
    """
    body = "".join(f'<h2>{escape(heading)}</h2>\n<div class="wide">{html}</div>\n' for heading, html in parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>\n{_STYLE}\n</style></head>\n'
        f'<body><h1>{escape(title)}</h1>\n<p class="{"good" if is_good else "bad"}">{escape(summary)}</p>\n{body}'
        "</body></html>\n"
    )


def preformatted(text: str) -> str:
    """A text as HTML that keeps its columns."""
    return f"<pre>{escape(text)}</pre>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table of HTML; the first is the header."""
    header, *others = rows
    cells = [*("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in others)]
    first = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in (first, *cells)) + "</table>"
