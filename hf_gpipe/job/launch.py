"""Start the processes of a job on this machine and wait for their end.

There are no restarts: a pipeline without one of its stages cannot continue. The next start resumes from the last
complete checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hf_gpipe.errors import EXIT_STOPPED
from hf_gpipe.job.failures import show
from hf_gpipe.job.job import LAUNCHER_PID
from hf_gpipe.job.open_files import check_open_files
from hf_gpipe.job.secret import SECRET_VARIABLE, new_secret, store_on_loopback
from hf_gpipe.job.signals import StopSignal
from hf_gpipe.job.supervise import Child, environment_of, first_failure, forwarding, wait_for_all


def launch(
    module: str,
    args: Sequence[str],
    num_processes: int,
    traceback_file: Path | None = None,
    *,
    threads: int | None = None,
    stop: StopSignal | None = None,
) -> int:
    """Run `python -m module args...` in several processes of one job on this machine, and wait for their end.

    SIGTERM and SIGINT are forwarded to the processes, once; on a second one all of them are killed.

    Args:
        module: must call `join_job`, and `failures.report` with its errors.
        traceback_file: where to put the traceback of a fault.
        threads: CPU threads of each process; None: see `join_job`.
        stop: notes signals, and how long the processes may take to end after one.

    Returns:
        The exit code: 0; EXIT_STOPPED where a signal stopped the job and all was saved; that of the process that failed
        first, 1 where a process was killed by a signal; or 128 plus the number of the signal that ended the job before
        it saved. The failure has been printed on stderr.

    Raises:
        UserError: the limit of open files is too low; no process was started.
    """
    environment = {SECRET_VARIABLE: new_secret(), **os.environ, LAUNCHER_PID: str(os.getpid())}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    check_open_files(num_processes)
    store = store_on_loopback()
    children: list[Child] = []
    stop = stop or StopSignal()
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-") as name, forwarding(stop, children):
        folder = Path(name)
        for rank in range(num_processes):
            own = environment | environment_of(folder, rank, num_processes, store.port)
            children.append(Child(rank, start([sys.executable, "-m", module, *args], own), folder))
        wait_for_all(children, stop)
        failure = first_failure(children)
    ended_by_signal = all(
        child.was_ended or child.exit_code == -(stop.signal or 0) or child.exit_code == 0 for child in children
    )
    if stop.signal is not None and (failure is None or ended_by_signal):
        if all(child.exit_code == EXIT_STOPPED for child in children):
            return EXIT_STOPPED
        print(f"stopped by {stop.signal.name} without saving", file=sys.stderr, flush=True)
        return 128 + stop.signal
    if failure is not None:
        # A launcher that was stopped for long finds, when it goes on, that its processes have said it themselves.
        if not failure.is_told:
            show(failure, traceback_file)
        return failure.exit_code
    return max(child.exit_code or 0 for child in children)


def start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process of a job in its own session: a terminal's signals reach it only through the launcher."""
    return subprocess.Popen(command, env=environment, start_new_session=True)
