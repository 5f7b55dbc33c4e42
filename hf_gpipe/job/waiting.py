"""Wait for processes that work for longer than a message may take: each says now and then that it is still there.

A wait without an end would never notice that the machine of a process has lost its power or its network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

#: Messages within the time limit of one.
_MESSAGES_PER_LIMIT = 4


@contextmanager
def working(group: dist.ProcessGroup, limit: timedelta, limits: float) -> Iterator[None]:
    """Context manager in which every process of a group works, some of them long; it ends when all have ended.

    Args:
        group: of CPU tensors, for nothing else meanwhile.
        limit: how long the others wait for a message.
        limits: how many of these limits a process that is done waits for the others' work.

    Raises:
        RuntimeError: after the work, if another process was lost, or worked for too long.
    """
    is_over, has_failed = threading.Event(), threading.Event()
    problems: list[RuntimeError] = []

    def tell() -> None:
        try:
            _tell(group, is_over, has_failed, limit.total_seconds(), limits)
        except RuntimeError as error:
            problems.append(error)

    teller = threading.Thread(target=tell, name="hf_gpipe-still-working", daemon=True)
    teller.start()
    try:
        yield
    except BaseException:
        # The others learn it by the end of this process.
        has_failed.set()
        is_over.set()
        raise
    is_over.set()
    teller.join()
    if problems:
        raise problems[0]


def _tell(
    group: dist.ProcessGroup, is_over: threading.Event, has_failed: threading.Event, limit: float, limits: float
) -> None:
    """Send messages until all processes have ended their work."""
    rank, deadline = dist.get_rank(group), float("inf")
    while True:
        is_done = is_over.wait(limit / _MESSAGES_PER_LIMIT)
        if has_failed.is_set():
            return
        if is_done:
            deadline = min(deadline, time.monotonic() + limits * limit)
        # With a type of its own: transformers changes the default one, of all threads, while it builds a model.
        done = torch.zeros(dist.get_world_size(group), dtype=torch.int32)
        done[rank] = is_done
        dist.all_reduce(done, group=group)
        if done.all():
            return
        if time.monotonic() > deadline:
            late = ", ".join(str(dist.get_global_rank(group, int(place))) for place in (done == 0).nonzero())
            raise RuntimeError(f"waited {limits * limit:g} seconds in vain for the work of process {late}")
