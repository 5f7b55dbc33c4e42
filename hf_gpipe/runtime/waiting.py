"""Wait for one process that works for longer than a message may take: it says now and then that it is still there.

A wait without an end would never notice that the machine of that process has lost its power or its network.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

#: Messages within the time limit of one.
_MESSAGES_PER_LIMIT = 4


@contextmanager
def working(group: dist.ProcessGroup, rank: int, limit: timedelta) -> Iterator[None]:
    """Context manager in which this process works, while all others call `wait_for`.

    Args:
        group: of CPU tensors, for nothing else meanwhile.
        rank: of this process.
        limit: how long the others wait for a message.

    Raises:
        RuntimeError: after the work, if another process was lost.
    """
    is_over, has_failed = threading.Event(), False
    problems: list[RuntimeError] = []

    def tell() -> None:
        try:
            while not is_over.wait(limit.total_seconds() / _MESSAGES_PER_LIMIT):
                dist.broadcast(torch.zeros(1), group_src=rank, group=group)
            if not has_failed:
                dist.broadcast(torch.ones(1), group_src=rank, group=group)
        except RuntimeError as error:
            problems.append(error)

    teller = threading.Thread(target=tell, name="hf_gpipe-still-working", daemon=True)
    teller.start()
    try:
        yield
    except BaseException:
        has_failed = True
        is_over.set()
        raise
    is_over.set()
    teller.join()
    if problems:
        raise problems[0]


def wait_for(group: dist.ProcessGroup, rank: int) -> None:
    """Wait until the process of this rank has done its work, in `working`.

    Raises:
        RuntimeError: it is lost, or says nothing within the group's time limit.
    """
    is_over = torch.zeros(1)
    while not is_over:
        dist.broadcast(is_over, group_src=rank, group=group)
