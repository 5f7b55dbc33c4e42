"""Every process says now and then that it is there, so that the wait for all of them at the end notices a lost one.

Some processes come to their end minutes after the others, as the main process, which draws and plans. How long that
takes says nothing. A process whose machine lost its power or its network says nothing any more, and neither do its
connections.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

#: Beats within the time limit of a message, and the longest time between two: another run hears them too (meeting.py).
_BEATS_PER_LIMIT = 4
_LONGEST_INTERVAL = timedelta(seconds=10)
_POLL_SECONDS = 0.02

_LOST = "waited for all processes to come to their end, and lost the connection to another process, which has the store"


def count_beats(store: dist.Store, rank: int) -> int:
    """How often the process of this rank has said that it is there, in the store of its start."""
    # Adding nothing reads a counter, and makes one where its process has not come to its first beat.
    return int(store.add(_key(rank), 0))


def _key(rank: int) -> str:
    return f"hf_gpipe/beats/{rank}"


class SilentError(RuntimeError):
    """A process that is waited for says nothing."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"waited for all processes to come to their end, and {what} has said nothing for {seconds:.0f} seconds"
        )


class Heartbeat:
    """The beats of this process, from a thread of its own, and its ear for those of the others.

    A beat also asks the store, whose calls have no time limit: where whoever has it is stopped, they do not return.

    Args:
        store: common to all processes of this start, or before they have met, of the job.
        limit: a process that does not beat for so long is lost.
    """

    def __init__(self, store: dist.Store, rank: int, num_processes: int, limit: timedelta) -> None:
        self._rank, self._num_processes, self.limit = rank, num_processes, limit
        self._interval = min(limit / _BEATS_PER_LIMIT, _LONGEST_INTERVAL)
        self._is_over = threading.Event()
        self._asked: float | None = None
        self._answered = 0.0
        # A store's client serves one thread at a time.
        clone: Callable[[], dist.Store] = cast(Any, store).clone  # of which torch's types do not know
        self._store = clone()
        _start(self._beat, clone())

    @property
    def silent_seconds(self) -> float:
        """How long the store has not answered the last beat; 0 if it has."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def stop(self) -> None:
        """Beat no more."""
        self._is_over.set()
        self._asked = None

    def wait_for_all(self, name: str, longest: timedelta) -> None:
        """Wait until every process has called this with the same name.

        Args:
            name: of the keys in the store.
            longest: how long to wait, whatever beats: a process that is stuck may do so.

        Raises:
            SilentError: one that has not called does not beat any more, or the store does not answer.
            RuntimeError: one has not come in time, or the store is lost.
        """
        start = self._answered = time.monotonic()
        is_done, problems = threading.Event(), list[Exception]()

        def listen() -> None:
            try:
                self._listen(name)
            except dist.DistNetworkError as error:
                lost = RuntimeError(_LOST)
                lost.__cause__ = error
                problems.append(lost)
            except RuntimeError as error:
                problems.append(error)
            is_done.set()

        # In a thread, for where the network is cut, no time limit ends a call of the store.
        _start(listen)
        while not is_done.wait(self._interval.total_seconds()):
            now = time.monotonic()
            if now - self._answered > (self.limit + self._interval).total_seconds():
                raise SilentError("the process that has the store", now - self._answered)
            if now - start > longest.total_seconds():
                raise RuntimeError(f"waited {now - start:.0f} seconds in vain for all processes to come to their end")
        if problems:
            raise problems[0]

    def _listen(self, name: str) -> None:
        self._store.set(f"{name}/{self._rank}", "")
        self._wait_for_keys(name)
        # The process that has the store must not end before the others have read it.
        self._store.set(f"{name}/seen/{self._rank}", "")
        if self._rank == 0:
            self._wait_for_keys(f"{name}/seen")

    def _wait_for_keys(self, name: str) -> None:
        """Wait until each process has set its key. A wait of the store's own would print a warning after a while."""
        keys = [f"{name}/{rank}" for rank in range(self._num_processes)]
        looked = time.monotonic()
        heard = dict.fromkeys(range(self._num_processes), (-1, looked))
        while not self._store.check(keys):
            self._answered = time.monotonic()
            if self._answered - looked > self._interval.total_seconds():
                looked = self._answered
                self._look_for_the_lost([rank for rank in heard if not self._store.check([keys[rank]])], heard)
            time.sleep(_POLL_SECONDS)

    def _look_for_the_lost(self, missing: Sequence[int], heard: dict[int, tuple[int, float]]) -> None:
        for rank in missing:
            count, now = count_beats(self._store, rank), time.monotonic()
            last, since = heard[rank]
            if count != last:
                heard[rank] = count, now
            elif now - since > self.limit.total_seconds():
                raise SilentError(f"process {rank}", now - since)

    def _beat(self, store: dist.Store) -> None:
        try:
            while not self._is_over.wait(self._interval.total_seconds()):
                self._asked = time.monotonic()
                store.add(_key(self._rank), 1)
                self._asked = None
        except RuntimeError:
            # The store is lost, or its process is at its end. Whoever waits learns it from a client of its own.
            self._asked = None


def _start(work: Callable[..., None], *given: object) -> None:
    threading.Thread(target=work, args=given, name="hf_gpipe-heartbeat", daemon=True).start()
