"""How far the preparation of data is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

#: Shown once so many seconds have passed, and then every so many: on a terminal, and elsewhere.
_TERMINAL, _ELSEWHERE = (2.0, 0.1), (10.0, 10.0)


def progress(
    items: Iterable[T] | None, what: str, unit: str = "", total: int | None = None, *, layout: str | None = None
) -> tqdm[T]:
    """The items, while stderr shows how many there were; of short work it shows nothing.

    Args:
        items: None: the caller updates what is returned, as a context manager.
        what: the work, as "reading pairs.jsonl".
        unit: of the items.
        total: how many there are; None: unknown.
        layout: tqdm's bar_format; None: its own.
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
