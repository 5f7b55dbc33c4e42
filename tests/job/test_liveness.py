"""Who is late is waited for, and who is lost is not: by the beats in the store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_gpipe.job.liveness import Liveness
from hf_gpipe.job.world import World
from tests.gloo import run_gloo

LIMIT = timedelta(seconds=3)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Waiting:
    """A process that waits for another one, from a thread, until `end`."""

    def __init__(self, live: Liveness, longest: float = 60.0) -> None:
        met = threading.Event()
        self._live = live
        self._thread = threading.Thread(target=live.wait, args=(met.wait, "the end of all", longest), daemon=True)
        self._thread.start()
        self.end: Callable[[], None] = met.set

    def problem(self, seconds: float) -> str:
        """The first problem within so many seconds; empty: there is none."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if text := self._live.problem()[0]:
                return text
            time.sleep(0.05)
        return ""


def test_a_late_process_is_waited_for_longer_than_for_a_message(store: dist.Store) -> None:
    ours, theirs = (Liveness(store, rank, 2, LIMIT) for rank in range(2))
    waiting = Waiting(ours)
    assert waiting.problem(7) == ""
    for one in (ours, theirs):
        one.stop()
    waiting.end()


def test_a_lost_process_is_named(store: dist.Store) -> None:
    ours, theirs = (Liveness(store, rank, 2, LIMIT) for rank in range(2))
    waiting, start = Waiting(ours), time.monotonic()
    threading.Timer(1.5, theirs.stop).start()
    problem = waiting.problem(60)
    assert problem.startswith("waited for the end of all, and process 1 has said nothing for ")
    # It may have said its last word some time before it ended.
    assert LIMIT.total_seconds() <= time.monotonic() - start < 30
    assert ours.problem()[1] is False
    ours.stop()
    waiting.end()


def test_a_process_that_is_lost_in_the_same_wait_is_named(store: dist.Store) -> None:
    """One that was stopped after it had begun the wait was not missing, and the others waited for ever."""
    ours, theirs = (Liveness(store, rank, 2, LIMIT) for rank in range(2))
    others, waiting = Waiting(theirs), Waiting(ours)
    assert waiting.problem(2) == ""
    theirs.stop()
    assert waiting.problem(60).startswith("waited for the end of all, and process 1 has said nothing for ")
    ours.stop()
    others.end()
    waiting.end()


def test_without_a_store_the_others_are_lost() -> None:
    """A process whose store was lost before its first beat in a wait had heard of nobody, and waited for ever."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ours = Liveness(dist.TCPStore("localhost", int(server.stdout.readline())), 1, 2, LIMIT)
        server.kill()
        server.wait()
        waiting = Waiting(ours)
        assert waiting.problem(60).startswith("waited for the end of all, and process 0 has said nothing for ")
        ours.stop()
        waiting.end()


def test_a_process_that_is_stuck_is_not_waited_for_forever(store: dist.Store) -> None:
    ours, theirs = (Liveness(store, rank, 2, LIMIT) for rank in range(2))
    waiting = Waiting(ours, longest=2.0)
    assert waiting.problem(60) == "waited 2 seconds in vain for the end of all (process 1)"
    ours.stop()
    theirs.stop()
    waiting.end()


SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_of_a_store_that_ends_its_process_tells_the_cause() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ours = Liveness(dist.TCPStore("localhost", int(server.stdout.readline())), 1, 2, LIMIT)
        server.kill()
        server.wait()
        time.sleep(2 * LIMIT.total_seconds())
        assert ours.problem() == ("", False)
        ours.stop()


class Silent(dist.Store):
    """A store behind a network that was cut: no call of it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = threading.Event()

    def clone(self) -> Silent:
        return self

    def add(self, key: str, amount: int) -> int:
        self.is_cut.wait()
        return 0


def test_a_store_that_says_nothing_is_lost() -> None:
    silent = Silent()
    ours = Liveness(silent, 1, 2, LIMIT)
    start = time.monotonic()
    while not ours.problem()[0]:
        assert time.monotonic() - start < 60
        time.sleep(0.05)
    text, is_of_store = ours.problem()
    assert text.startswith("the process that has the store of this job has said nothing for ")
    assert is_of_store
    silent.is_cut.set()
    ours.stop()


def _work_with_another_default_type() -> int:
    """As transformers does while it builds a model of another type."""
    world = World.current()
    for _ in range(2):
        with world.working():
            torch.set_default_dtype(torch.float64 if world.rank else torch.float32)
            time.sleep(0.2 * world.rank)
            torch.set_default_dtype(torch.float32)
    return world.rank


def test_processes_wait_for_work_one_after_the_other() -> None:
    """Processes told each other meanwhile that they were there, and with tensors of two types gloo aborted them."""
    assert run_gloo(_work_with_another_default_type, 2) == [0, 1]


class Half(Silent):
    """A store to which one connection is closed, and on another one no call ends."""

    def add(self, key: str, amount: int) -> int:
        if threading.current_thread().name == "hf_gpipe-beats":
            raise dist.DistNetworkError("Connection was likely closed")
        return super().add(key, amount)


def test_a_wait_whose_store_does_not_answer_ends() -> None:
    """The process was stuck before it was known to wait: its network was cut one way, and its beats had ended."""
    half = Half()
    ours = Liveness(half, 1, 2, LIMIT)
    waiting = Waiting(ours)
    assert waiting.problem(60).startswith("waited for the end of all, and process 0 has said nothing for ")
    ours.stop()
    half.is_cut.set()
    waiting.end()
