"""How every command and script joins its job, and the faults that nothing else would tell or end.

Three threads and a hook: the beats (liveness.py), a watch that ends this process where its launcher is gone, the store
or a process is silent, or the data do not come; and what is printed of an exception that a script does not catch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist

from hf_gpipe.errors import EXIT_FAILURE, UserError
from hf_gpipe.job import facts, failures, network
from hf_gpipe.job.job import LAUNCHER_PID, STACK_SIGNAL, STACK_VARIABLE, Job, available_cores, in_job
from hf_gpipe.job.liveness import WATCH_SECONDS, Liveness, innermost
from hf_gpipe.job.meeting import meet
from hf_gpipe.job.started import note_launcher
from hf_gpipe.job.store import signed

#: The end of the interpreter may wait for messages that no one answers any more, but for no longer.
END_SECONDS = 10.0


def join_job(timeout_seconds: float, threads: int | None = None) -> Job:
    """Join the job that a launcher started this process for. Without one, or a second time, nothing is joined.

    It works the same in the processes of `hf_gpipe.job.launch` and in those of torchrun, `accelerate launch` and
    srun. The process ends at once when its launcher is gone, and on SIGINT, even while it waits for a message.

    Args:
        timeout_seconds: how long a process waits for another one, once all have started, before the run fails.
        threads: CPU threads of this process; None: OMP_NUM_THREADS, or its share of this machine's cores.

    Raises:
        UserError: on every process: their versions differ, or their machines do not reach each other (job/facts.py);
            the port is in use; the limit of open files is too low.
    """
    note_launcher()
    if in_job():
        tell_uncaught()
        _watch()
    job = Job.current()
    is_new = in_job() and not dist.is_initialized()
    if is_new and threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if threads is not None:
        torch.set_num_threads(threads)
    if is_new:
        _meet(job, timedelta(seconds=timeout_seconds))
    if in_job():
        # torch puts a hook of its own before ours, which keeps what is printed there until it returns.
        tell_uncaught()
    return job


def _meet(job: Job, timeout: timedelta) -> None:
    """Find the other processes by the launcher's word, and connect to them."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's handler runs between two of its own instructions, so never while gloo or NCCL waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    job.timeout, job.parent = timeout, int(os.environ.get(LAUNCHER_PID) or os.getppid())
    _show_stack_on_demand()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    network.check_open_files(int(os.environ["WORLD_SIZE"]))
    network.check_main_address(int(os.environ["RANK"]))
    try:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=job.apart)))
    except dist.DistError as error:
        raise UserError(_no_store(error)) from None
    # Until all have met, they may be further apart.
    job.liveness = Liveness(store, rank, size, max(job.apart, timeout))
    # The store may have what processes wrote that the launcher has started before.
    job.start = meet(signed(store, "meeting"), rank, size, job.apart)
    of_start = dist.PrefixStore(job.start, store)
    own = job.store = signed(of_start, job.start)
    # The time limit is that of messages. Processes may start further apart, so they meet here first.
    ranks = facts.check(own, rank, size, max(job.apart, timeout), "hf_gpipe/started")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        network.stay_on_loopback()
    # NCCL asks the store from threads of its own for as long as the process lives, which must not need Python.
    of_torch = of_start if "nccl" in backend else own
    dist.init_process_group(backend, store=of_torch, rank=rank, world_size=size, timeout=timeout)
    job.met(ranks)
    job.liveness = Liveness(own, rank, size, timeout)
    job.waiting_group()


def _no_store(error: dist.DistError) -> str:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if "EADDRINUSE" in str(error):
        return (
            f"MASTER_PORT is {os.environ['MASTER_PORT']}, and on machine {socket.gethostname()} another program, such "
            "as another run, has that port; give each run its own"
        )
    return (
        f"process {os.environ['RANK']} on machine {socket.gethostname()} cannot meet the others at {address}: "
        f"{' '.join(str(error).split())}; see whether the first machine's processes run, whether that port is free "
        "there, and whether its firewall lets it through"
    )


def _show_stack_on_demand() -> None:
    """Write the stack of this process on STACK_SIGNAL, even while it is stuck in a call outside of Python."""
    if path := os.environ.get(STACK_VARIABLE):
        # Open for as long as the process runs.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


# ---------------------------------------------------------------------- the watch


@cache
def _watch() -> None:
    """Start the thread that ends this process where nothing else would, once in a process."""

    def watch() -> None:
        while Job.current().parent in (None, os.getppid()):
            time.sleep(WATCH_SECONDS)
            if problem()[0]:
                # A process that was stopped itself, and goes on, has not heard the answer yet.
                time.sleep(2 * WATCH_SECONDS)
                if (found := problem())[0]:
                    _end(*found)
        os._exit(EXIT_FAILURE)  # a killed launcher cannot stop its processes

    threading.Thread(target=watch, name="hf_gpipe-watch", daemon=True).start()


def problem() -> tuple[str, bool, bool]:
    """Why this process must end, empty if it need not; whether the store answers; whether another process is late."""
    job = Job.current()
    if job.liveness is not None and (found := job.liveness.problem())[0]:
        text, is_of_store = found
        return text, not is_of_store, not is_of_store
    # A moment before the others, who wait for the mini-batch as for any message, so that this is what is told.
    if job.reading_since is not None and dist.is_initialized():
        seconds = time.monotonic() - job.reading_since
        if seconds > job.limit.total_seconds() - 2.0:
            return f"the dataset has given nothing for {seconds:.0f} seconds{innermost()}", True, False
    return "", True, False


def _end(text: str, store_answers: bool, is_late: bool) -> None:
    work = Job.current().work
    where = f"{failures.of_machine()}process {os.environ.get('RANK', '0')}{', ' * bool(work)}{work}"
    failures.end(failures.Failure(f"{where}: {text}", is_time_limit=is_late), store_answers=store_answers)


# ---------------------------------------------------------------------- uncaught exceptions


def tell_uncaught() -> None:
    """Let exceptions that the script does not catch be told as the command tells them.

    The process that failed first prints the traceback, unless the user can correct the error, and one line; processes
    that only lost their connection to it print nothing. Exit codes are those of the command. Called again, it comes
    first again among the hooks.
    """
    if sys.excepthook is not _Hook.first:
        sys.excepthook = _Hook.first = _Hook(sys.excepthook)


class _Hook:
    """Replaces `sys.excepthook`, and calls the one before for faults of this process itself."""

    first: ClassVar[_Hook | None] = None

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self is not self.first or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        failure = failures.describe(error)
        if not isinstance(error, UserError) and not failure.is_consequence:
            self._before(kind, error, trace)
        code = failures.tell(failure)
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        # The interpreter ends with this code after its exit functions, such as those of experiment trackers.
        sys.exit(code)
