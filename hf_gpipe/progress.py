"""Progress of work that takes long, such as preparing data: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

#: Seconds before progress is first shown, and between updates: on a terminal, and otherwise.
_TERMINAL, _ELSEWHERE = (2.0, 0.1), (10.0, 10.0)


class Progress(tqdm):
    """A bar of tqdm on stderr; short work shows nothing. Where stderr is no terminal, each update is a line."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._is_terminal = sys.stderr.isatty()
        delay, interval = _TERMINAL if self._is_terminal else _ELSEWHERE
        super().__init__(*args, **options, leave=False, delay=delay, mininterval=interval, miniters=1, unit_scale=True)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show `msg`, by default how far the work is."""
        if self._time() < self.start_t + self.delay:
            return False
        if self._is_terminal:
            shown: bool = super().display(msg, pos)
            return shown
        if text := str(self) if msg is None else msg:
            print(text, file=sys.stderr, flush=True)
        return False

    def close(self) -> None:
        """End it. A file keeps the last state, if there were others."""
        if (
            not getattr(self, "disable", True)
            and not self._is_terminal
            and self.last_print_t >= self.start_t + self.delay
        ):
            self.refresh()
        super().close()


def progress(
    items: Iterable[T] | None, what: str, unit: str = "", total: int | None = None, *, layout: str | None = None
) -> tqdm[T]:
    """Iterate over items and show their number.

    Args:
        items: the items; None: the caller uses the result as a context manager and updates it.
        what: the work, such as "reading pairs.jsonl".
        unit: the unit of the items.
        total: the number of items; None: unknown.
        layout: tqdm's bar_format; None: its default.
    """
    return Progress(items, what, total, unit=f" {unit}", bar_format=layout)
