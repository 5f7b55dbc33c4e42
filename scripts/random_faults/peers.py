"""Peers that nobody has invited: at every port that the processes of a run have opened."""

from __future__ import annotations

import random
import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta

import psutil
import torch.distributed as dist


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses and ports at which a process listens."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return []  # it has just ended
    return [(own.laddr.ip, own.laddr.port) for own in found if own.status == psutil.CONN_LISTEN]


def send_garbage(pids: list[int], dice: random.Random) -> None:
    """To every port of these processes."""
    for _, port in (address for pid in pids for address in listening(pid)):
        for size in (0, 1, 8, 64, 5000):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2.0) as peer:
                peer.sendall(dice.randbytes(size))


def flood(pids: list[int], count: int = 50, seconds: float = 2.0) -> None:
    """Connect to every port of these processes many times, say nothing, and stay."""
    with ExitStack() as stack:
        for _, port in (address for pid in pids for address in listening(pid)):
            for _ in range(count):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=2.0))
        time.sleep(seconds)


def meddle(port: int, dice: random.Random) -> int:
    """Answer in the store of a run for its processes, as one that knows the names of the keys; an exit code."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    forged = ("[]", "{}", "x", '["a", "b"]', "00" * 40, '{"host": "a"}')
    for key in ("hf_gpipe/asks/1", "hf_gpipe/met", "hf_gpipe/start", "hf_gpipe/ended/1", "hf_gpipe/failed"):
        store.set(key, dice.choice(forged))
    return 0
