"""In place of the interpreter of a worker of `pytest -n`: has the worker forked from a process of tests/fork_server.py.

Else each worker takes as long for its imports as that process. This program stays until the worker has ended.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection


def work(files: tuple[Connection, ...], environment: dict[str, str], program: str) -> None:
    """Be `python -c program` with these standard files."""
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    set_start_method(None, force=True)  # that of a process that was not forked
    exec(program, {"__name__": "__main__"})
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(sys.path[0])  # the tests are a package in the root
    from tests import fork_server, forked_worker

    fork_server.join()
    files = tuple(Connection(os.dup(number)) for number in range(3))
    given = (files, dict(os.environ), sys.argv[-1])
    worker = get_context("forkserver").Process(target=forked_worker.work, args=given)
    worker.start()
    for number in (0, 1):  # which end where the worker ends
        os.close(number)
    for file in files:
        file.close()
    worker.join()
    sys.exit(worker.exitcode)
