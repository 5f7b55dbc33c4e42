"""Start the processes of a job on this machine, or join the job that a launcher started.

`launch` runs torch's elastic launcher as a library, without restarts: a pipeline that lost a stage cannot go on, and
the next start resumes from the last complete checkpoint. `join` works the same in its processes and in those of
torchrun and `accelerate launch`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hf_gpipe.runtime.failures import EXIT_FAILURE, LAUNCHER_PID, Failure, read_error_file, show

#: Seconds between two looks of a process at whether its launcher is still there.
WATCH_SECONDS = 0.5
#: Seconds that processes get to end when one of them has failed.
GRACE_SECONDS = 5


def in_job() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout_seconds: float = 600.0, threads: int | None = None) -> None:
    """Join the job that this process was started for; without one, or a second time, nothing is joined.

    Args:
        timeout_seconds: how long a process waits for another one before the run fails.
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
    _end_with(int(os.environ.get(LAUNCHER_PID) or os.getppid()))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))


def leave() -> None:
    """Leave the job at the end, once every process has come here."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def launch(
    module: str,
    args: Sequence[str],
    num_processes: int,
    traceback_file: Path | None = None,
    *,
    threads: int | None = None,
) -> int:
    """Run `python -m module args...` in several processes of one job on this machine, and wait for their end.

    Args:
        module: must call `join`, and `failures.report` with what it raises.
        args: its arguments.
        num_processes: number of processes.
        traceback_file: where to put the traceback of a fault.
        threads: CPU threads of each process; None: see `join`.

    Returns:
        The exit code: 0, that of the process that failed first, 1 where a process was killed by a signal, or 128 and
        the number of the signal that ended this launcher. What failed has been printed on stderr.
    """
    environment = {LAUNCHER_PID: str(os.getpid()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-") as folder, _environment(environment), _quiet_launcher():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            # Port 0: the system chooses one that is free.
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *args)
        except ChildFailedError as error:
            failure = first_failure(error.failures)
            show(failure, traceback_file)
            return failure.exit_code
        except SignalException as error:
            print(f"stopped by {error.sigval.name}", file=sys.stderr, flush=True)
            return 128 + error.sigval
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> Failure:
    """The failure that made the others, of those that torch's launcher found, by rank.

    In this order: the first process that failed by itself; one that a signal killed; one that ended without a word;
    one that SIGTERM killed, which is also what the launcher sends the others; the first that lost its connection.
    """
    noted = {rank: read_error_file(found.error_file_data) for rank, found in failures.items()}
    described = [failure for failure in noted.values() if failure is not None]
    silent = {rank: failures[rank].exitcode for rank, failure in noted.items() if failure is None}
    causes = [failure for failure in described if not failure.is_consequence]
    if silent and not causes:
        rank, code = min(silent.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
        return Failure(_without_a_word(rank, code), EXIT_FAILURE, is_consequence=False, time=time.time(), traceback="")
    return min(causes or described, key=lambda failure: failure.time)


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _without_a_word(rank: int, exit_code: int) -> str:
    if exit_code > 0:
        return f"process {rank} ended with exit code {exit_code}"
    number = signal.Signals(-exit_code)
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"process {rank} was killed by {number.name}{hint}"


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: a killed launcher cannot stop it any more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="hf_gpipe-parent-watch", daemon=True).start()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that this process's children inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Without the log lines of torch's launcher, and with the signal handlers as they were afterwards."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    prefix = "torch.distributed.elastic"
    loggers = [logging.getLogger(n) for n in [*logging.root.manager.loggerDict, prefix] if n.startswith(prefix)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
