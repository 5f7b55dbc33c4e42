"""Medians with their ranges, ratios paired by repetition, and tables as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGABYTE = 1e6


@dataclass(frozen=True)
class Spread:
    """The median and the range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The ratio within each repetition: what drifts from one repetition to the next does not enter it."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text under a header, the first column to the left and all others to the right, as Markdown."""
    widths = [max(3, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join((first, *rest))} |"

    return "\n".join(line(row) for row in (header, rule, *rows))


def write_json(path: Path | None, data: Any) -> None:
    """Write the figures where a path is given."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
