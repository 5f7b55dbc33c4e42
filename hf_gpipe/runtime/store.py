"""The store at which the processes of a job meet, where whoever has it may not answer: its calls have no time limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

#: Questions within the time limit of a message, and the longest time between two.
_QUESTIONS_PER_LIMIT, _LONGEST_PAUSE_SECONDS = 4, 10.0
#: Between two looks whether a store that is asked is still there.
_LOOK_SECONDS = 0.25


class Answers:
    """Asks a store again and again, in a thread, whether it is still there.

    Args:
        store: common to the processes of the job.
        limit: how long it may say nothing.
    """

    def __init__(self, store: dist.Store, limit: timedelta) -> None:
        self.limit = limit
        self._pause = min(limit.total_seconds() / _QUESTIONS_PER_LIMIT, _LONGEST_PAUSE_SECONDS)
        self._asked: float | None = None
        self._is_over = threading.Event()
        # A store's client serves one thread at a time.
        clone: Callable[[], dist.Store] = cast(Any, store).clone  # of which torch's types do not know
        threading.Thread(target=self._ask, args=(clone(),), name="hf_gpipe-store", daemon=True).start()

    @property
    def silent_seconds(self) -> float:
        """How long the store has not answered; 0 if it has."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        self._asked = None

    def _ask(self, store: dist.Store) -> None:
        try:
            while not self._is_over.wait(self._pause):
                self._asked = time.monotonic()
                store.check(["hf_gpipe/any"])
                self._asked = None
        except RuntimeError:
            # The store is lost, or its process is at its end. Whoever needs it learns it from a client of its own.
            self._asked = None


def count_in_store(host: str, port: int, key: str, seconds: float) -> int:
    """Add 1 to a counter in the store at an address, and return its new value.

    Raises:
        TimeoutError: the store does not answer within so many seconds: the process that has it is stopped, or its
            machine cannot be reached.
        OSError: the store is not there.
    """
    counts: list[int] = []

    def ask() -> None:
        with suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
            counts.append(store.add(key, 1))

    thread = threading.Thread(target=ask, name="hf_gpipe-count", daemon=True)
    thread.start()
    end = time.monotonic() + seconds + 1
    while thread.is_alive() and time.monotonic() < end:
        # torch tries again and again to connect, also where nobody listens any more, and the process that has the
        # store may end while this one asks.
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError:
            thread.join(_LOOK_SECONDS)
            if not counts:
                raise
        thread.join(_LOOK_SECONDS)
    if counts:
        return counts[0]
    if thread.is_alive():
        raise TimeoutError(f"the store at {host}:{port} does not answer")
    raise ConnectionError(f"there is no store at {host}:{port}")
