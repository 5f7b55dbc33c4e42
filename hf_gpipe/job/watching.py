"""A thread that ends this process where nothing else would: the store is silent, or the data do not come.

A call of the store has no time limit where whoever has it is stopped (SIGSTOP), or behind a network that was cut. That
may be the launcher, torchrun's agent or the main process. And a dataset is foreign code, in which the main thread may
wait for ever. Both end with one line: after one and a half time limits of a message, and after one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from hf_gpipe.job import failures
from hf_gpipe.job.job import Job

_POLL_SECONDS = 1.0
#: How many time limits of messages the store may be silent: a lost machine is noticed by its messages before.
_STORE_LIMITS = 1.5


@cache
def watch() -> None:
    """Start the thread, once in a process."""
    threading.Thread(target=_watch, name="hf_gpipe-watch", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        for find, store_answers in ((_silence_of_store, False), (_silence_of_data, True)):
            if not find():
                continue
            # A process that was stopped itself, and goes on, has not heard the answer yet.
            time.sleep(_POLL_SECONDS)
            if problem := find():
                _end(problem, store_answers)


def _silence_of_store() -> str:
    """Text that says that the store does not answer; empty if it does."""
    heartbeat = Job.current().heartbeat
    if heartbeat is None or heartbeat.silent_seconds < _STORE_LIMITS * heartbeat.limit.total_seconds():
        return ""
    return (
        f"the process that has the store of this job has said nothing for {heartbeat.silent_seconds:.0f} seconds"
        f"{_stopped_parent()}"
    )


def _silence_of_data() -> str:
    """Text that says that a mini-batch does not come; empty if none is waited for, or not for long."""
    job = Job.current()
    if job.reading_since is None:
        return ""
    # A moment before the others, who wait for the mini-batch as for any message, so that this is what is told.
    seconds = time.monotonic() - job.reading_since
    if seconds < job.limit.total_seconds() - 2 * _POLL_SECONDS:
        return ""
    return f"the dataset has given nothing for {seconds:.0f} seconds{_innermost()}"


def _stopped_parent() -> str:
    """Text that names this process's launcher, if it is stopped."""
    with suppress(OSError):
        if Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            return f": its launcher, process {os.getppid()}, is stopped (SIGSTOP); end it, or let it go on with SIGCONT"
    return "; it is stopped, or its machine or network is lost"


def _innermost() -> str:
    """The function and the line at which the main thread is, as text."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"


def _end(problem: str, store_answers: bool) -> None:
    work = Job.current().work
    where = f"{failures.of_machine()}process {os.environ.get('RANK', '0')}{', ' * bool(work)}{work}"
    failures.end(failures.Failure(f"{where}: {problem}"), store_answers=store_answers)
