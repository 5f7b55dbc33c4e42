"""With `pytest -n`, one process from which the tests of all workers fork theirs (tests/gloo.py).

Else each worker has one of its own, and each of those takes 6 CPU seconds to import what is in tests/preloaded.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

#: Names the socket of that process, in the environment of the workers.
ADDRESS = "PYTEST_FORK_SERVER"
#: What multiprocessing.forkserver does, but it imports nothing before the first test asks for a process.
SERVE = """
import select, sys
from multiprocessing.forkserver import main
listener, alive = map(int, sys.argv[1:])
select.select([listener, alive], [], [])
main(listener, alive, ["tests.preloaded"])
"""


def offer() -> Callable[[], None]:
    """Start it for the processes that this one starts; the function that ends it. It ends with this process too."""
    folder = tempfile.TemporaryDirectory(prefix="hf_gpipe-fork-")
    alive, own_end = os.pipe()  # where no process has the other end any more, the server ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{folder.name}/socket")
        listener.listen()
        descriptors = (listener.fileno(), alive)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, *map(str, descriptors)],
            pass_fds=descriptors,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.close(alive)
    os.environ[ADDRESS] = address

    def end() -> None:
        os.close(own_end)
        server.wait()
        folder.cleanup()

    return end


def join() -> None:
    """Let multiprocessing fork from that process, where there is one."""
    if (address := os.environ.get(ADDRESS)) is None:
        return
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running
