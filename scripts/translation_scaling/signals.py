"""Signals that this command gets and passes on to the trainings that it started."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """Passes SIGINT, SIGTERM and SIGHUP on to the trainings, as SIGINT and SIGTERM, and remembers that one came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Signals:
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup ignores stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def passed_to(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Context manager that passes the signals on to the child."""
        self._children.append(child)
        if self.received is not None:
            self._send(child, self.received)
        try:
            yield
        finally:
            self._children.remove(child)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for child in list(self._children):
            self._send(child, number)

    def _send(self, child: subprocess.Popen[bytes], number: int) -> None:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
