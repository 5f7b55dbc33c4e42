"""Work in a thread beside the training, such as writing a checkpoint; and whether there is memory for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil

from hf_gpipe.runtime.world import World

#: Of the memory that a machine has available, the share that copies may take: the files that are written need as much
#: again until they are on the disk.
_COPIES_SHARE = 0.5
_CGROUP = Path("/sys/fs/cgroup")


def begun(work: Callable[[], None], name: str) -> Future[None]:
    """Begin some work in a thread of its own; the result waits for it, and raises what it raised."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # told by the thread that waits
            future.set_exception(error)
        else:
            future.set_result(None)

    # A thread that waits for a process that is lost must not keep this one from ending.
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def has_memory_for(num_bytes: int, world: World) -> bool:
    """Whether every machine has memory for copies of so many bytes of each of its processes.

    Every process must call it, and gets the same answer.
    """
    everyone = world.gather_objects((socket.gethostname(), num_bytes, available_memory()))
    for host, _, available in everyone:
        wanted = sum(size for other, size, _ in everyone if other == host)
        if wanted > _COPIES_SHARE * available:
            return False
    return True


def available_memory() -> int:
    """Bytes that processes of this machine, or of this container, may still use."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The file cache is given back on demand.
        available = min(available, limit - used + int(counts["inactive_file"]))
    return available
