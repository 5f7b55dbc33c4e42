"""Medians with their ranges, ratios paired by repetition, and tables as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine

MEGABYTE = 1e6


class Spread(NamedTuple):
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


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under a header, the first column to the left and all others to the right, as Markdown."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    padded = [[f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def write_json(path: Path | None, **data: Any) -> None:
    """Write the figures with their environment, where a path is given."""
    if path is not None:
        path.write_text(json.dumps({"environment": machine.environment(), **data}, indent=1) + "\n")
