"""The processes that test_launch.py starts: each does what its argument says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job import failures, launch
from hf_gpipe.job.job import Job
from hf_gpipe.job.joining import join_job
from hf_gpipe.job.world import World
from hf_gpipe.modes.visits.visit import DROP
from hf_gpipe.runtime.background import BackgroundThreads
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Resource

#: What a message may take where one is waited for in vain, or where work takes longer: a busy machine takes seconds.
LIMIT_SECONDS, LONGER_SECONDS = 6, 8


def body(what: str, folder: Path) -> None:
    is_short = what in ("stuck", "explained", "late", "preparing", "dies", "stopped", "unread", "sleep")
    job = join_job(timeout_seconds=LIMIT_SECONDS if is_short else 60)
    rank = dist.get_rank()
    job.note("testing")
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        if what == "fault":
            raise KeyError("the cause")
        if what == "user error":
            raise UserError("the key is wrong")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "explained":
            # The other process has given up and ended when this one has found its words.
            error = KeyError("the cause")
            failures.note(error)
            time.sleep(LONGER_SECONDS)
            raise UserError("the cause, explained") from error
        if what == "beside":
            # In a thread, while the main thread waits in gloo for a process that waits for this one.
            BackgroundThreads(rank).begin(Resource.COPY_OUT, Action(DROP, 3), fail)
            dist.recv(torch.ones(1), 0)
        if what in ("wait", "stuck", "watchdog"):
            time.sleep(600)
    if what == "unread" and rank == 0:
        next(Job.current().noting(never(), "reading a mini-batch"))
    if what == "sleep":
        time.sleep(600)
    if what == "watchdog":
        job.note_abort(timedelta(seconds=2))
        threading.Timer(1, abort_in_a_thread_outside_of_python).start()
    if what in ("preparing", "dies", "stopped"):
        # Longer than a message may take.
        World.current().from_main(lambda: prepare(what), takes_long=True)
    # Waits in gloo, where no Python handler runs.
    dist.all_reduce(torch.ones(1))
    sys.stdout.write(f"process {rank} of {dist.get_world_size()}, {torch.get_num_threads()} threads\n")
    if what == "late" and rank == 0:
        time.sleep(LONGER_SECONDS)
    job.leave()


def fail() -> None:
    raise KeyError("the cause")


def never() -> Iterator[int]:
    """A dataset that gives nothing."""
    while True:
        time.sleep(1)
    yield 1


def prepare(what: str) -> None:
    time.sleep(LONGER_SECONDS)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def abort_in_a_thread_outside_of_python() -> None:
    """End this process as NCCL's watchdog does."""
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)


def start(what: str, folder: Path) -> int:
    """Start two processes that do it, and wait for their end."""
    return launch.launch("tests.job.launch_worker", [what, str(folder)], 2, folder / "error.txt")


def work(what: str, folder: Path) -> int:
    """Do it in one of the two."""
    try:
        body(what, folder)
    except Exception as error:
        code = failures.report(error)
        sys.stdout.flush()
        os._exit(code)
    return 0
