"""Start the processes of a job on this machine, and wait until all have ended. One message says why a job failed.

There are no restarts: a pipeline without one of its stages cannot continue. The next start resumes from the last
complete checkpoint. torch's own agent is not used here: it ends all processes at the first exit, without the grace in
which they tell what they were doing, the stack of one that is stuck, and the exit code of a stopped training.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hf_gpipe.errors import EXIT_STOPPED
from hf_gpipe.job.failures import Failure, read_error_file, show, waited
from hf_gpipe.job.job import LAUNCHER_PID, NCCL_LIMIT, STACK_SIGNAL, STACK_VARIABLE, WORK_VARIABLE, read_note
from hf_gpipe.job.network import check_open_files
from hf_gpipe.job.signals import STOP_SIGNALS, StopSignal
from hf_gpipe.job.store import SECRET_VARIABLE, new_secret, store_on_loopback

#: Seconds that the other processes have to notice a failure, report what they were doing, and end.
GRACE_SECONDS = 4.0
#: Seconds that the other processes have to end after one has ended without failure: all leave the job together.
LEAVE_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass
class Child:
    """A process of the job.

    Attributes:
        folder: where it leaves its notes.
        was_ended: whether the launcher had to kill it.
        stack: its stack at that time, as a Python traceback.
    """

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    was_ended: bool = False
    stack: str = ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self.process.poll()

    @property
    def work(self) -> str:
        """The work that it noted."""
        return read_note(_file(self.folder, self.rank, "work"))

    def end(self) -> None:
        """Kill the process and keep the stack at which it was stuck."""
        file = _file(self.folder, self.rank, "stack")
        if file.exists():  # the process handles the signal
            before = file.stat().st_size
            self.process.send_signal(STACK_SIGNAL)
            deadline = time.monotonic() + 0.5
            while file.stat().st_size == before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
            self.stack = file.read_text(errors="replace")[before:]
        self.was_ended = True
        self.process.kill()
        self.process.wait()


def _file(folder: Path, rank: int, what: str) -> Path:
    """The file in which a process notes its failure ("error.json"), its "work", or on STACK_SIGNAL its "stack"."""
    return folder / f"{rank}.{what}"


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
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-") as name, _forwarding(stop, children):
        folder = Path(name)
        for rank in range(num_processes):
            own = environment | environment_of(folder, rank, num_processes, store.port)
            children.append(Child(rank, start([sys.executable, "-m", module, *args], own), folder))
        _wait_for_all(children, stop)
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


def environment_of(folder: Path, rank: int, num_processes: int, port: int) -> dict[str, str]:
    """The variables by which a process of a local job finds the others, named as torch's launcher names them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is in the launcher, which outlives every process of the job.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_ERROR_FILE": str(_file(folder, rank, "error.json")),
        WORK_VARIABLE: str(_file(folder, rank, "work")),
        STACK_VARIABLE: str(_file(folder, rank, "stack")),
    }


@contextmanager
def _forwarding(stop: StopSignal, children: Sequence[Child]) -> Iterator[None]:
    """Context manager in which signals to this launcher are noted, and the first is sent to its processes."""

    def handle(number: int, frame: object) -> None:
        if stop.receive(number):
            for child in children:
                if child.exit_code is None:
                    child.process.send_signal(number)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_all(children: Sequence[Child], stop: StopSignal) -> None:
    """Wait for the end of all processes; kill those that do not end soon after the first one, or after a signal."""
    deadline = float("inf")
    while running := [child for child in children if child.exit_code is None]:
        now = time.monotonic()
        codes = [child.exit_code for child in children if child.exit_code is not None]
        if any(code not in (0, EXIT_STOPPED) for code in codes):
            deadline = min(deadline, now + GRACE_SECONDS)
        elif codes:
            deadline = min(deadline, now + LEAVE_SECONDS)
        if now > deadline or stop.is_urgent or stop.seconds > stop.within + GRACE_SECONDS:
            for child in running:
                child.end()
        time.sleep(_POLL_SECONDS)


# ---------------------------------------------------------------------- the cause


def first_failure(children: Sequence[Child]) -> Failure | None:
    """The failure that caused the others; None if no process failed.

    In this order: the first process that failed by itself; one that was killed by a signal; the first that waited
    too long; one that ended without a message; one that did not end with the others; the first that lost its
    connection.
    """
    files = {child.rank: read_error_file(_file(child.folder, child.rank, "error.json")) for child in children}
    noted = {rank: failure for rank, failure in files.items() if failure is not None}
    causes = [failure for failure in noted.values() if not failure.is_consequence]
    consequences = sorted((f for f in noted.values() if f.is_consequence), key=lambda failure: failure.time)
    ended = [child for child in children if child.was_ended]
    silent = [
        child
        for child in children
        if child.rank not in noted and not child.was_ended and child.exit_code not in (0, EXIT_STOPPED)
    ]
    # NCCL's watchdog aborts the processes that wait for one that ended otherwise.
    aborted = {child.rank: failure for child in silent if (failure := _aborted_by_nccl(child)) is not None}
    if causes:
        first = min(causes, key=lambda failure: (failure.is_time_limit, failure.time))
        if not first.is_time_limit:
            return first
        # A process that was killed, but not by another launcher, is what the others waited for.
        if not any((c.exit_code or 0) < 0 and c.exit_code != -signal.SIGTERM and c.rank not in aborted for c in silent):
            return _with_stuck(first, ended)
    if silent:
        # SIGTERM comes last: another launcher sends it to the processes that are left.
        child = min(silent, key=lambda c: (c.exit_code == -signal.SIGTERM, c.rank in aborted, c.exit_code or 0, c.rank))
        if child.rank in aborted:
            return _with_stuck(aborted[child.rank], ended)
        # The first process that lost its connection, and its action.
        places = [failure.message.partition(":")[0] for failure in consequences[:1]]
        return Failure(_unreported_exit(child) + "".join(f"; its loss was noticed by {place}" for place in places))
    if ended:
        return _with_stuck(Failure("the processes did not end together"), ended)
    return consequences[0] if consequences else None


def _aborted_by_nccl(child: Child) -> Failure | None:
    """The failure of a process that NCCL's watchdog aborted; None for any other.

    The watchdog is no thread of Python's, so that the stacks in the file have no "Current thread".
    """
    if child.exit_code != -signal.SIGABRT:
        return None
    file = _file(child.folder, child.rank, "stack")
    text = file.read_text(errors="replace") if file.exists() else ""
    limit, _, stacks = text.removeprefix(NCCL_LIMIT).partition("\n")
    if not text.startswith(NCCL_LIMIT) or "Aborted" not in stacks or "Current thread" in stacks:
        return None
    message = (
        f"process {child.rank}{', ' * bool(child.work)}{child.work}: {waited(float(limit))}, or lost the connection to "
        f"it, and was ended by NCCL's watchdog{_innermost(stacks)}"
    )
    return Failure(message, traceback=stacks)


def _unreported_exit(child: Child) -> str:
    code = child.exit_code or 0
    where = f" while {child.work}" if child.work else ""
    if code > 0:
        return f"process {child.rank} ended with exit code {code}{where}"
    number = signal.Signals(-code)
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"process {child.rank} was killed by {number.name}{where}{hint}"


def _with_stuck(failure: Failure, stuck: Sequence[Child]) -> Failure:
    """Add to a failure the processes that were stuck and had to be killed: the others waited for them."""
    parts, tracebacks = [failure.message], [failure.traceback]
    for child in stuck:
        work = child.work
        parts.append(f"process {child.rank} was stuck{' while ' * bool(work)}{work}{_innermost(child.stack)}")
        tracebacks.append(f"The stack of process {child.rank}, which was stuck:\n{child.stack}")
    return replace(failure, message="; ".join(parts), traceback="\n".join(part for part in tracebacks if part))


def _innermost(stack: str) -> str:
    """The innermost function of the main thread's stack, which comes last, as text; empty without a stack."""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', stack.rpartition("hread 0x")[2])
    if not frames:
        return ""
    file, line, function = frames[0]
    return f", in {function} ({Path(file).name}, line {line})"
