"""Progress of data preparation: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

#: Seconds before progress is first shown, and between updates: on a terminal, and otherwise.
_TERMINAL, _ELSEWHERE = (2.0, 0.1), (10.0, 10.0)


def progress(
    items: Iterable[T] | None, what: str, unit: str = "", total: int | None = None, *, layout: str | None = None
) -> tqdm[T]:
    """Iterate over items and show their number on stderr; short work shows nothing.

    Args:
        items: the items; None: the caller uses the result as a context manager and updates it.
        what: the work, such as "reading pairs.jsonl".
        unit: the unit of the items.
        total: the number of items; None: unknown.
        layout: tqdm's bar_format; None: its default.
    """
    is_terminal = sys.stderr.isatty()
    delay, interval = _TERMINAL if is_terminal else _ELSEWHERE
    return tqdm(
        items,
        what,
        total,
        leave=not is_terminal,
        unit=f" {unit}",
        unit_scale=True,
        delay=delay,
        mininterval=interval,
        miniters=1,
        bar_format=layout,
    )
