"""The signals that ask a job to stop, handled in the same way by its launcher and its processes."""

from __future__ import annotations

import signal
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: Signals within this time count as one: a terminal or a scheduler sends its signal to every process, and a launcher
#: forwards its own too.
SAME_SIGNAL_SECONDS = 1.0


class StopSignal:
    """The states of a request to stop: not asked, asked, and urgent once a second signal has come.

    Args:
        within: how many seconds what is to stop may take to do so.

    Attributes:
        signal: the first signal; None: nobody has asked.
        is_urgent: whether a second one has come, after SAME_SIGNAL_SECONDS.
    """

    def __init__(self, within: float = 30.0) -> None:
        self.within = within
        self.signal: signal.Signals | None = None
        self.is_urgent = False
        self._time = 0.0

    def receive(self, number: int) -> bool:
        """Take a signal; returns whether it is the first one."""
        if self.signal is None:
            self.signal, self._time = signal.Signals(number), time.monotonic()
            return True
        self.is_urgent = self.is_urgent or self.seconds > SAME_SIGNAL_SECONDS
        return False

    @property
    def seconds(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return 0.0 if self.signal is None else time.monotonic() - self._time
