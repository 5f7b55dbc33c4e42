"""With `pytest -n`, two processes from which the tests of all workers fork theirs: tests/gloo.py, tests/emulated_cuda.

Else each worker has its own, and each of those takes 6 CPU seconds for its imports. The workers are forked from the
first too, by tests/forked_worker.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

#: They name the sockets of these processes, in the environment of the workers.
PLAIN, EMULATED = "PYTEST_FORK_SERVER", "PYTEST_EMULATED_FORK_SERVER"
#: The first does what multiprocessing.forkserver does. The second imports nothing before a test asks for a process.
SERVE = {
    PLAIN: "from multiprocessing.forkserver import main; main(listener, alive, ['tests.preloaded'])",
    EMULATED: """if listener in select.select([listener, alive], [], [])[0]:
    from tests.emulated_cuda.processes import serve_all; serve_all(listener, alive)""",
}


def offer(name: str, environment: Mapping[str, str]) -> Callable[[], None]:
    """Start one of them for the processes that this one starts; the function that ends it. It ends with this one too.

    Args:
        name: of `SERVE`.
        environment: of the process.
    """
    folder = tempfile.TemporaryDirectory(prefix="hf_gpipe-fork-")
    alive, own_end = os.pipe()  # where no process has the other end any more, the server ends
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := f"{folder.name}/socket")
        listener.listen()
        descriptors = (listener.fileno(), alive)
        server = subprocess.Popen(
            [sys.executable, "-c", f"import select\nlistener, alive = {descriptors}\n{SERVE[name]}"],
            env=environment,
            pass_fds=descriptors,
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.close(alive)
    os.environ[name] = address

    def end() -> None:
        os.close(own_end)
        server.kill()  # an interpreter with so many modules takes a second to end
        server.wait()
        folder.cleanup()

    return end


def join() -> None:
    """Let multiprocessing fork from the first of them, where it is offered."""
    if (address := os.environ.get(PLAIN)) is None:
        return
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running
