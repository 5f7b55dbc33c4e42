"""A counter in the store at which the processes of a job meet, where whoever has it may not answer."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

#: Between two looks whether a store that is asked is still there.
_LOOK_SECONDS = 0.25


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
