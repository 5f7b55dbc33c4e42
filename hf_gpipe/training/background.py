"""Work in a thread beside the training, such as writing a checkpoint; and whether there is memory for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from hf_gpipe.job.facts import available_memory
from hf_gpipe.job.world import World

#: The share of a machine's available memory that copies may take: the files that are written need as much again until
#: they are on the disk.
_COPIES_SHARE = 0.5


def begun(work: Callable[[], None], name: str) -> Future[None]:
    """Begin some work in a thread of its own. The future's result waits for it, and raises its error."""
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
    """Whether every machine has memory for copies of `num_bytes` for each of its processes.

    Every process must call it, and gets the same answer.
    """
    everyone = world.gather_objects((num_bytes, available_memory()))
    wanted = Counter[str]()
    for host, (size, _) in zip(world.hosts, everyone, strict=True):
        wanted[host] += size
    return all(wanted[host] <= _COPIES_SHARE * there for host, (_, there) in zip(world.hosts, everyone, strict=True))
