"""Traces of any number of rows, computed from traces of a few numbers of rows.

The size of a layer's tensor and the operations of a product either do not depend on the rows of a micro-batch or are
proportional to them. So every number of a trace lies on a line over the rows. The bytes that are alive after each new
tensor lie on a line too; only their maximum, the peak, may bend. Traces of three numbers of rows show whether this is
so. If all that was traced between two numbers of rows lies on the line, what is not traced between them does too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

#: The fewest rows that are traced: a single row is not padded, and there may be no mask.
FEWEST_ROWS = 2

Numbers = TypeVar("Numbers", bound=tuple[Any, ...])
"""A tuple of whole numbers and of such tuples."""


class ByRows(Generic[Numbers]):
    """A function of the number of rows that is computed for few of them.

    Args:
        compute: number of rows -> the value.
        can_be_linear: whether the values may lie on a line; asked after the first value was computed.
    """

    def __init__(self, compute: Callable[[int], Numbers], can_be_linear: Callable[[], bool]) -> None:
        self._compute, self._can_be_linear = compute, can_be_linear
        self._computed: dict[int, Numbers] = {}

    def __call__(self, rows: int) -> Numbers:
        """The value of a number of rows."""
        if rows not in self._computed:
            value = self._on_line(rows)
            if value is not None:
                return value
            if len(self._computed) == 1 and rows > FEWEST_ROWS and self._can_be_linear():
                # Where several sizes are asked for, the next ones lie between this size and the largest.
                self._computed.setdefault(FEWEST_ROWS, self._compute(FEWEST_ROWS))
            self._computed[rows] = self._compute(rows)
        return self._computed[rows]

    def _on_line(self, rows: int) -> Numbers | None:
        """The value on the line through all that was computed; None where there is none, or it was not checked."""
        known = sorted(number for number in self._computed if number >= FEWEST_ROWS)
        if len(known) < 3 or not known[0] < rows < known[-1] or not self._can_be_linear():
            return None
        low, *between, high = known
        if any(self._at(number, low, high) != self._computed[number] for number in between):
            return None
        return self._at(rows, low, high)

    def _at(self, rows: int, low: int, high: int) -> Numbers | None:
        return _at(rows, (low, self._computed[low]), (high, self._computed[high]))


def _at(rows: int, first: tuple[int, Any], last: tuple[int, Any]) -> Any:
    """The value at `rows` on the line through two (rows, value); None where it has no slope in whole numbers."""
    (low, start), (high, end) = first, last
    if isinstance(start, tuple):
        if len(start) != len(end):
            return None
        values = [_at(rows, (low, first_value), (high, other)) for first_value, other in zip(start, end, strict=True)]
        return None if None in values else start._make(values) if hasattr(start, "_make") else tuple(values)
    if start == end:
        return start
    slope, rest = divmod(end - start, high - low)
    return None if rest else start + slope * (rows - low)
