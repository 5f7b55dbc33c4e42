"""The wait for all processes at the end: who is late is waited for, and who is lost is not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_gpipe.job.heartbeat import Heartbeat

LIMIT, LONGEST = timedelta(seconds=3), timedelta(seconds=60)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_a_late_process_is_waited_for_longer_than_for_a_message(store: dist.Store) -> None:
    ours, theirs = (Heartbeat(store, rank, 2, LIMIT) for rank in range(2))
    start = time.monotonic()
    threading.Timer(7, lambda: theirs.wait_for_all("end", LONGEST)).start()
    ours.wait_for_all("end", LONGEST)
    assert 7 <= time.monotonic() - start < 30
    ours.stop()
    theirs.stop()


def test_a_lost_process_is_named(store: dist.Store) -> None:
    ours, theirs = (Heartbeat(store, rank, 2, LIMIT) for rank in range(2))
    start = time.monotonic()
    threading.Timer(1.5, theirs.stop).start()
    with pytest.raises(RuntimeError, match=r"process 1 has said nothing for \d+ seconds"):
        ours.wait_for_all("end", LONGEST)
    # It may have said its last word some time before it ended.
    assert LIMIT.total_seconds() <= time.monotonic() - start < 30
    ours.stop()


def test_a_process_that_is_stuck_is_not_waited_for_forever(store: dist.Store) -> None:
    ours, theirs = (Heartbeat(store, rank, 2, LIMIT) for rank in range(2))
    with pytest.raises(RuntimeError, match=r"waited \d seconds in vain for all processes"):
        ours.wait_for_all("end", timedelta(seconds=2))
    ours.stop()
    theirs.stop()


SERVER = """
import time
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_that_ends_is_lost() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ours = Heartbeat(dist.TCPStore("localhost", int(server.stdout.readline())), 1, 2, LIMIT)
        threading.Timer(1.0, server.kill).start()
        with pytest.raises(RuntimeError, match="lost the connection to another process, which has the store"):
            ours.wait_for_all("end", LONGEST)
        ours.stop()


class Silent(dist.Store):
    """A store behind a network that was cut: no call of it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = threading.Event()

    def clone(self) -> Silent:
        return self

    def add(self, key: str, amount: int) -> int:
        return 0

    def set(self, key: str, value: str) -> None:
        self.is_cut.wait()


def test_a_store_that_says_nothing_is_lost() -> None:
    silent = Silent()
    ours = Heartbeat(silent, 1, 2, LIMIT)
    with pytest.raises(RuntimeError, match="the process that has the store has said nothing for"):
        ours.wait_for_all("end", LONGEST)
    silent.is_cut.set()
    ours.stop()
