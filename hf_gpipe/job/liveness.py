"""Each process says now and then that it is there, and each ends where nothing else would end it.

A process beats: a thread adds to its counter in the store. Where a process waits for longer than a message may take,
gloo notices at once that another one has ended; that its machine has lost its power or its network, only its beats tell
it. A beat also asks the store, whose calls have no time limit: where the process that has it is stopped (SIGSTOP), or
cut off, they do not return. And a dataset is foreign code, in which the main thread may wait for ever.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

#: Beats within the time limit of a message, and the longest time between two: another run hears them too (meeting.py).
_BEATS_PER_LIMIT, _LONGEST_INTERVAL_SECONDS = 4, 10.0
#: How many time limits of messages the store may be silent: a lost machine is noticed by its messages before.
_STORE_LIMITS = 1.5
#: Seconds between two looks of the thread that watches.
WATCH_SECONDS = 0.5


def count_beats(store: dist.Store, rank: int) -> int:
    """How often the process of this rank has said that it is there, in the store of its start."""
    # Adding nothing reads a counter, and makes one where its process has not come to its first beat.
    return int(store.add(f"hf_gpipe/beats/{rank}", 0))


@dataclass
class _Wait:
    """A wait for all processes: for what, the number of its thread's waits, how long at most, and since when."""

    what: str
    number: int
    longest: float
    start: float


class Liveness:
    """The beats of this process, and its ear for those of others.

    Args:
        store: common to all processes of this start, or before they have met, of the job.
        limit: a process that does not beat for so long is lost.
    """

    def __init__(self, store: dist.Store, rank: int, num_processes: int, limit: timedelta) -> None:
        self.limit = limit.total_seconds()
        self._rank, self._size = rank, num_processes
        self._is_over = threading.Event()
        self._asked: float | None = None
        self._waits: dict[str, _Wait] = {}
        #: The last count of each process's beats while this one waits, and when it was new; and who has not yet begun
        #: each thread's wait.
        self._heard: dict[int, tuple[int, float]] = {}
        self._missing: dict[str, list[int]] = {}
        clone: Callable[[], dist.Store] = store.clone  # type: ignore[attr-defined]  # torch's types do not know it
        # A store's client serves one thread at a time.
        self._store, self._lock = clone(), threading.Lock()
        self._num_waits = Counter[str]()
        threading.Thread(target=self._beat, args=(clone(),), name="hf_gpipe-beats", daemon=True).start()

    def stop(self) -> None:
        """Beat no more."""
        self._is_over.set()
        self._asked = None

    def wait(self, meet: Callable[[], object], what: str, longest: float = math.inf, thread: str = "") -> None:
        """Wait until all processes call this, however long it takes one that says that it is there.

        Args:
            meet: returns once every process calls it, and raises an error where one has ended.
            what: for what they wait, in messages: "the work of all processes".
            longest: the seconds after which this process ends, whoever says that it is there.
            thread: whose wait it is: threads wait for those of the same name.
        """
        self._num_waits[thread] += 1
        wait = _Wait(what, self._num_waits[thread], longest, time.monotonic())
        # Before the store is asked, whose answer may never come.
        self._waits[thread] = wait
        try:
            with self._lock, suppress(RuntimeError):  # without a store, messages still tell who has ended
                self._store.add(f"hf_gpipe/waits/{thread}/{self._rank}", 1)
            meet()
        finally:
            del self._waits[thread]

    def problem(self) -> tuple[str, bool]:
        """Why this process must end: because of the store (True), or of a process that is waited for; else empty."""
        now = time.monotonic()
        asked = self._asked
        if asked is not None and now - asked > _STORE_LIMITS * self.limit:
            return (
                f"the process that has the store of this job has said nothing for {now - asked:.0f} seconds"
                f"{_stopped_parent()}"
            ), True
        for thread, wait in list(self._waits.items()):
            # One that has begun the wait too is lost where it is stopped before all are there.
            # Nothing at all is heard of the others where the store is lost before the first beat.
            for rank in (rank for rank in range(self._size) if rank != self._rank):
                _, since = self._heard.get(rank, (0, wait.start))
                if now - max(since, wait.start) > self.limit:
                    return (
                        f"waited for {wait.what}, and process {rank} has said nothing for {now - since:.0f} seconds"
                    ), False
            missing = self._missing.get(thread, [])
            if missing and now - wait.start > wait.longest:
                late = ", ".join(map(str, missing))
                return f"waited {wait.longest:g} seconds in vain for {wait.what} (process {late})", False
        return "", False

    def _beat(self, store: dist.Store) -> None:
        with suppress(RuntimeError):  # the store is lost, or its process is at its end: whoever waits learns it
            while not self._is_over.wait(min(self.limit / _BEATS_PER_LIMIT, _LONGEST_INTERVAL_SECONDS)):
                self._asked = time.monotonic()
                store.add(f"hf_gpipe/beats/{self._rank}", 1)
                waits = list(self._waits.items())
                self._missing = {thread: self._late(store, thread, wait.number) for thread, wait in waits}
                for rank in range(self._size if waits else 0):
                    count = count_beats(store, rank)
                    if self._heard.get(rank, (-1, 0.0))[0] != count:
                        self._heard[rank] = count, time.monotonic()
                self._asked = None
        self._asked = None

    def _late(self, store: dist.Store, thread: str, number: int) -> list[int]:
        """The processes that have not yet begun the wait of this number. Adding nothing reads a counter."""
        return [rank for rank in range(self._size) if store.add(f"hf_gpipe/waits/{thread}/{rank}", 0) < number]


def _stopped_parent() -> str:
    """Text that names this process's launcher, if it is stopped."""
    with suppress(OSError):
        if Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return f": its launcher, process {os.getppid()}, is stopped (SIGSTOP); end it, or let it go on with SIGCONT"
    return "; it is stopped, or its machine or network is lost"


def innermost() -> str:
    """The function and the line at which the main thread is, as text."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
