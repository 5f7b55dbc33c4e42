"""Peers that nobody has invited: at every port that the processes of a run have opened."""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

#: The state of a socket that listens, in /proc/net/tcp.
_LISTENS = "0A"


def listening(pid: int) -> list[tuple[str, int]]:
    """The addresses, as hexadecimal digits, and ports at which a process listens."""
    addresses, sockets = [], set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                    address, _, port = fields[1].partition(":")
                    addresses.append((address, int(port, 16)))
    except OSError:
        return addresses  # it has just ended
    return addresses


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
