"""Starting processes, and how a job of several ends: in seconds, with one message and the right exit code."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from hf_gpipe.errors import EXIT_STOPPED, PeerError, StageError, UserError
from hf_gpipe.job import failures
from hf_gpipe.job.job import Job
from hf_gpipe.job.launch import Child, _file, first_failure
from scripts.forked import fork_ahead
from tests import forked_command
from tests.job import launch_worker


def forked(what: str, folder: Path) -> BaseProcess:
    """The launcher in a process that is forked, as are those that it starts."""
    return forked_command.start_function(folder, start_forked, what, folder)


def start_forked(what: str, folder: Path) -> int:
    fork_ahead(lambda rank: launch_worker.work(what, folder), folder, 2)
    return launch_worker.start(what, folder)


def texts(folder: Path) -> tuple[str, str]:
    """What the launcher and its processes have written to stdout and stderr."""
    return (folder / "run.out").read_text(), (folder / "run.err").read_text()


JOINED = ["process 0 of 2, 1 threads", "process 1 of 2, 1 threads"]


# late: one ends later than a message may; preparing: the others wait as long for its data
@pytest.mark.parametrize("what", ["fine", "late", "preparing"])
def test_processes_join_one_job_and_wait_longer_than_for_a_message(what: str, tmp_path: Path) -> None:
    """tests/test_train.py starts them as a user does."""
    process = forked(what, tmp_path)
    process.join(200)
    out, err = texts(tmp_path)
    assert (process.exitcode, err) == (0, "")
    assert sorted(out.splitlines()) == JOINED


@pytest.mark.parametrize(
    ("what", "exit_code", "message"),
    [
        ("fault", 1, "error: process 1, testing: KeyError: 'the cause' (the traceback is in {error})"),
        ("user error", 2, "error: the key is wrong"),
        (
            "beside",
            1,
            "error: process 1, stage 3, action 3D, in a background thread: KeyError: 'the cause' (testing) (the "
            "traceback is in {error})",
        ),
        ("explained", 2, "error: the cause, explained"),
        (
            "killed",
            1,
            "error: process 1 was killed by SIGKILL while testing, as the system does when memory runs out; its loss "
            "was noticed by process 0, testing",
        ),
        (
            "dies",
            1,
            "error: process 0 was killed by SIGKILL while testing, as the system does when memory runs out; its loss "
            "was noticed by process 1, testing",
        ),
        (
            "stopped",
            1,
            "error: process 1, testing: waited for the work of all processes, and process 0 has said nothing for {n} "
            "seconds; process 0 was stuck while testing (the traceback is in {error})",
        ),
        (
            "stuck",
            1,
            "error: process 0, testing: RuntimeError: waited 6 seconds in vain for a message from another process; "
            "process 1 was stuck while testing, in body (launch_worker.py, line {line}) (the traceback is in {error})",
        ),
        (
            "watchdog",
            1,
            "error: process 0, testing: waited 2 seconds in vain for a message from another process, or lost the "
            "connection to it, and was ended by NCCL's watchdog, in all_reduce (distributed_c10d.py, line {torch}); "
            "process 1 was stuck while testing, in body (launch_worker.py, line {line}) (the traceback is in {error})",
        ),
    ],
)
def test_a_failure_is_told_once(what: str, exit_code: int, message: str, tmp_path: Path) -> None:
    process = forked(what, tmp_path)
    process.join(200)
    ended = time.time()
    out, err = texts(tmp_path)
    line = next(
        n for n, text in enumerate(Path(launch_worker.__file__).read_text().splitlines(), 1) if "sleep(600" in text
    )
    found = re.sub(r"(distributed_c10d.py, line )\d+", r"\1{torch}", err)
    found = re.sub(r"(said nothing for )\d+", r"\1{n}", found)
    # Which of the two gloo was waiting for when the time was over is chance.
    found = found.replace("a message to be taken by", "a message from")
    assert found == message.format(error=tmp_path / "error.txt", line=line, torch="{torch}", n="{n}") + "\n"
    assert (process.exitcode, out) == (exit_code, "")
    # Since both were there: starting them takes as long as the machine needs.
    assert ended - max(file.stat().st_mtime for file in tmp_path.glob("*.pid")) < 45
    assert_ended(tmp_path)
    if what == "fault":
        assert "raise KeyError" in (tmp_path / "error.txt").read_text()


@pytest.mark.parametrize(
    ("number", "exit_code", "message"),
    [
        (signal.SIGKILL, -signal.SIGKILL, ""),
        (signal.SIGINT, 128 + signal.SIGINT, "stopped by SIGINT without saving\n"),
        (signal.SIGTERM, 128 + signal.SIGTERM, "stopped by SIGTERM without saving\n"),
    ],
)
def test_no_process_outlives_its_launcher(number: int, exit_code: int, message: str, tmp_path: Path) -> None:
    launcher = forked("wait", tmp_path)
    assert launcher.pid is not None
    try:
        wait_for_both(tmp_path, launcher)
        os.kill(launcher.pid, number)
        launcher.join(60)
        assert (launcher.exitcode, texts(tmp_path)[1]) == (exit_code, message)
        assert_ended(tmp_path)
    finally:
        launcher.kill()


def test_a_dataset_that_gives_nothing_ends_the_run(tmp_path: Path) -> None:
    process = forked("unread", tmp_path)
    process.join(200)
    assert re.fullmatch(
        r"error: process 0, reading a mini-batch: the dataset has given nothing for \d+ seconds, in never "
        r"\(launch_worker.py, line \d+\)\n",
        texts(tmp_path)[1],
    ), texts(tmp_path)
    assert process.exitcode == 1
    assert_ended(tmp_path)


def test_no_process_waits_for_ever_for_a_launcher_that_is_stopped(tmp_path: Path) -> None:
    """It has the store, whose calls have no time limit."""
    launcher = forked("sleep", tmp_path)
    assert launcher.pid is not None
    try:
        wait_for_both(tmp_path, launcher)
        os.kill(launcher.pid, signal.SIGSTOP)
        assert_ended(tmp_path, 100)
        line = texts(tmp_path)[1]
        assert re.fullmatch(
            r"error: process 0, testing: the process that has the store of this job has said nothing for \d+ seconds: "
            rf"its launcher, process {launcher.pid}, is stopped \(SIGSTOP\); end it, or let it go on with SIGCONT\n",
            line,
        ), line
        os.kill(launcher.pid, signal.SIGCONT)
        launcher.join(60)
        assert launcher.exitcode == 1
        assert texts(tmp_path)[1] == line, "it is told once, though the launcher goes on"
    finally:
        launcher.kill()


def wait_for_both(folder: Path, launcher: BaseProcess) -> None:
    """Until process 0 waits in gloo for process 1, which sleeps."""
    deadline = time.monotonic() + 200
    while len(process_ids(folder)) < 2:
        assert launcher.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)


def process_ids(folder: Path) -> list[int]:
    files = [folder / f"{rank}.pid" for rank in range(2)]
    return [int(text) for file in files if file.exists() and (text := file.read_text())]


def assert_ended(folder: Path, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    for process in process_ids(folder):
        while is_running(process):
            assert time.monotonic() < deadline, f"process {process} still runs"
            time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and not yet waited for by whoever adopted it


def test_a_lost_connection_is_a_consequence_and_a_time_limit_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job.current(), "work", "")  # of an earlier test in this process
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    error = StageError("process 0, stage 0, action 0F0: RuntimeError")
    error.__cause__ = lost
    assert failures.describe(error).is_consequence
    assert failures.describe(PeerError("the main process failed")).is_consequence
    assert not failures.describe(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:82] Timed out")).is_consequence
    assert not failures.describe(ValueError("no")).is_consequence
    limit = failures.describe(
        DistBackendError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=RECV, NumelIn=8, "
            "NumelOut=8, Timeout(ms)=600000) ran for 600081 milliseconds before timing out."
        )
    )
    assert (limit.is_consequence, limit.is_time_limit) == (False, True)
    assert "DistBackendError: waited 600 seconds in vain for a message from another process" in limit.message
    monkeypatch.setattr(Job, "limit", timedelta(seconds=12))
    closed = failures.describe(StageError("process 0, stage 0, action 0B1: Application timeout caused pair closure"))
    assert (closed.is_consequence, closed.is_time_limit) == (False, True)
    assert "0B1: waited 12 seconds in vain for a message from another process" in closed.message
    cause = StageError("process 0, stage 0, action 0B1")
    cause.__cause__ = RuntimeError("Application timeout caused pair closure")
    assert not failures.describe(cause).is_consequence
    unconnected = failures.describe(DistStoreError("wait timeout after 12000ms, keys: /98dc//0//2//cpu//0/1"))
    assert (unconnected.is_consequence, unconnected.is_time_limit) == (False, True)
    assert unconnected.message.endswith("waited 12 seconds in vain for a connection to another process")
    lost_store = RuntimeError("lost the connection to another process, which has the store")
    lost_store.__cause__ = DistNetworkError("connection refused")
    assert failures.describe(lost_store).is_consequence
    assert failures.describe(UserError("a\nb")).message == "a b"
    # On several machines the name of this one is told.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    lost_in_action = StageError(f"process 0, stage 0, action 0F0: RuntimeError: {lost} [10.0.0.1]:4711")
    place = "machine b: process 0, stage 0, action 0F0"
    assert failures.describe(lost_in_action).message == f"{place}: lost the connection to another process"
    reset = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:46: Connection reset by peer. GLHF!")
    assert failures.describe(reset).message.endswith("RuntimeError: lost the connection to another process")
    broken = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:9] writev [10.0.0.1]:46: Broken pipe")
    assert failures.describe(broken).message.endswith("RuntimeError: lost the connection to another process")
    assert failures.describe(broken).is_consequence
    store = failures.describe(DistNetworkError("Broken pipe"))
    assert store.message.endswith("lost the connection to another process, which has the store (Broken pipe)")
    assert store.is_consequence
    assert failures.describe(UserError("wrong")).message == "wrong"


class Ended:
    """Stands in for a process that has ended."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def poll(self) -> int:
        return self._exit_code


def test_the_first_failure_is_the_cause(tmp_path: Path) -> None:
    def found(rank: int, exit_code: int, was_ended: bool = False, **noted: object) -> Child:
        made = Child(rank, Ended(exit_code), tmp_path, was_ended, "")  # type: ignore[arg-type]
        _file(tmp_path, rank, "error.json").unlink(missing_ok=True)
        if noted:
            values = {"exit_code": exit_code, "is_consequence": False, "time": 5.0, "traceback": ""} | noted
            failures._write_error_file(_file(tmp_path, rank, "error.json"), failures.Failure(**values))  # type: ignore[arg-type]
        _file(tmp_path, rank, "work").write_text(f"doing {rank}")
        return made

    lost = {"message": "process 1, stage 1, action 1F0: lost", "is_consequence": True, "time": 1.0}
    waited = {"message": "waited", "is_time_limit": True}
    cases: dict[str, Callable[[], list[Child]]] = {
        "early": lambda: [found(0, 1, message="late"), found(1, 1, message="early", time=4.0)],
        "cause": lambda: [found(0, 1, **lost), found(1, 1, message="cause")],
        "2 was killed by SIGSEGV while doing 2; its loss was noticed by process 1, stage 1, action 1F0": lambda: [
            found(0, -15),
            found(1, 1, **lost),
            found(2, -11),
        ],
        "process 2 ended with exit code 3": lambda: [found(0, -15), found(1, 1, **lost), found(2, 3)],
        "process 0 was killed by SIGTERM": lambda: [found(0, -15), found(1, 1, **lost)],
        "lost": lambda: [found(0, 1, **lost)],
        "cause before SIGKILL": lambda: [found(0, -9, True), found(1, 1, message="cause before SIGKILL")],
        "waited; process 1 was stuck while doing 1": lambda: [found(0, 1, **waited), found(1, -9, True)],
        "process 1 was killed by SIGKILL while doing 1": lambda: [found(0, 1, **waited), found(1, -9)],
        "waited long": lambda: [found(0, 1, **waited | {"message": "waited long"}), found(1, -15)],
        "an error": lambda: [found(0, 1, **waited | {"time": 1.0}), found(1, 1, message="an error"), found(2, -9)],
        "did not end together; process 1 was stuck": lambda: [found(0, 0), found(1, -9, True)],
    }
    for expected, make in cases.items():
        failure = first_failure(make())
        assert failure is not None
        assert expected in failure.message
    assert first_failure([found(0, 0), found(1, EXIT_STOPPED)]) is None
