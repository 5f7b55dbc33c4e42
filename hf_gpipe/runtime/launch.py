"""Start the processes of a job on this machine, or join the job that a launcher started.

There are no restarts: a pipeline that lost a stage cannot go on, and the next start resumes from the last complete
checkpoint. `join` works the same in the processes of `launch` and in those of torchrun and `accelerate launch`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_gpipe.runtime.failures import EXIT_FAILURE, EXIT_STOPPED, LAUNCHER_PID, show
from hf_gpipe.runtime.supervise import (
    STACK_SIGNAL,
    STACK_VARIABLE,
    Stop,
    Worker,
    environment_of,
    first_failure,
    wait_for_all,
)

#: Seconds between two looks of a process at whether its launcher is still there.
WATCH_SECONDS = 0.5
#: Seconds that the processes of a job may start apart, as on machines that read their programs over a network, and end
#: apart, as when the main process draws and plans; more where messages may take longer.
APART_SECONDS = 300.0

#: How long a process waits for another one; None in a job that was not joined by `join`: torch's default.
_timeout: timedelta | None = None
#: Where the processes of the job that `join` joined meet.
_store: dist.Store | None = None


def in_job() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout_seconds: float = 600.0, threads: int | None = None) -> None:
    """Join the job that this process was started for; without one, or a second time, nothing is joined.

    Args:
        timeout_seconds: how long a process waits for another one, once all have started, before the run fails.
        threads: CPU threads of this process; None: OMP_NUM_THREADS, or its share of this machine's cores.

    The process ends at once when its launcher is gone, and on SIGINT, even while it waits for a message.
    """
    if dist.is_initialized() or not in_job():
        if threads is not None:
            torch.set_num_threads(threads)
        return
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // local_processes)
    if threads is not None:
        torch.set_num_threads(threads)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's handler runs between two of its own instructions, so never while gloo or NCCL waits.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    global _timeout, _store
    _timeout = timedelta(seconds=timeout_seconds)
    _end_with(int(os.environ.get(LAUNCHER_PID) or os.getppid()))
    _show_stack_on_demand()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    _store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=APART_SECONDS))))
    # The time limit is that of messages. Processes may start further apart, so they meet here first.
    _meet(_store, "started", rank, size)
    dist.init_process_group(backend, store=_store, rank=rank, world_size=size, timeout=_timeout)


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A group of some processes with the job's time limit: torch gives a new group one of its own, 30 minutes long."""
    return dist.new_group(list(ranks), timeout=_timeout, backend=backend)


def leave() -> None:
    """Leave the job at the end, once every process has come here."""
    global _store
    if dist.is_initialized():
        if _store is None:
            dist.barrier()
        else:
            _meet(_store, "ended", dist.get_rank(), dist.get_world_size())
            _store = None
        dist.destroy_process_group()


def launch(
    module: str,
    args: Sequence[str],
    num_processes: int,
    traceback_file: Path | None = None,
    *,
    threads: int | None = None,
    stop_seconds: float = 30.0,
) -> int:
    """Run `python -m module args...` in several processes of one job on this machine, and wait for their end.

    SIGTERM and SIGINT are forwarded to the processes, once; on a second one all of them are killed.

    Args:
        module: must call `join`, and `failures.report` with what it raises.
        args: its arguments.
        num_processes: number of processes.
        traceback_file: where to put the traceback of a fault.
        threads: CPU threads of each process; None: see `join`.
        stop_seconds: how long the processes may take to end after a signal.

    Returns:
        The exit code: 0; EXIT_STOPPED where a signal stopped the job and all was saved; that of the process that failed
        first, 1 where a process was killed by a signal; or 128 and the number of the signal that ended the job without
        a word. What failed has been printed on stderr.
    """
    environment = dict(os.environ) | {LAUNCHER_PID: str(os.getpid())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    # Port 0: the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers: list[Worker] = []
    stop = Stop()
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-") as name, stop.listening(workers):
        folder = Path(name)
        for rank in range(num_processes):
            own = environment | environment_of(folder, rank, num_processes, store.port)
            workers.append(Worker(rank, start([sys.executable, "-m", module, *args], own), folder))
        wait_for_all(workers, stop, stop_seconds)
        failure = first_failure(workers)
    ended_by_signal = all(
        worker.was_ended or worker.exit_code == -(stop.signal or 0) or worker.exit_code == 0 for worker in workers
    )
    if stop.signal is not None and (failure is None or ended_by_signal):
        if all(worker.exit_code == EXIT_STOPPED for worker in workers):
            return EXIT_STOPPED
        print(f"stopped by {stop.signal.name} without saving", file=sys.stderr, flush=True)
        return 128 + stop.signal
    if failure is not None:
        show(failure, traceback_file)
        return failure.exit_code
    return max(worker.exit_code or 0 for worker in workers)


def start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process of a job, in a session of its own: a terminal's signals reach it through the launcher alone."""
    return subprocess.Popen(command, env=environment, start_new_session=True)


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meet(store: dist.Store, where: str, rank: int, size: int) -> None:
    """Wait until every process is here, which may take longer than a message."""
    store.set(f"hf_gpipe/{where}/{rank}", "")
    limit = max(timedelta(seconds=APART_SECONDS), _timeout or timedelta())
    store.wait([f"hf_gpipe/{where}/{other}" for other in range(size)], limit)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: a killed launcher cannot stop it any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="hf_gpipe-parent-watch", daemon=True).start()


def _show_stack_on_demand() -> None:
    """Let our launcher ask where this process is, also while it is stuck in a call outside of Python."""
    if path := os.environ.get(STACK_VARIABLE):
        # Open for as long as the process runs.
        faulthandler.register(STACK_SIGNAL, file=os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), all_threads=False)
