"""What goes wrong before the processes of a script have met, or is not caught by it: one line, in seconds."""

from __future__ import annotations

import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.job import failures, joining
from hf_gpipe.job.job import Job
from hf_gpipe.job.store import count_in_store
from scripts import tiny_run
from scripts.forked import train_forked
from tests.forked_command import Program
from tests.test_train import ENVIRONMENT, REPOSITORY

SCRIPT = """
import os, resource, sys, time
from hf_gpipe.errors import UserError
from hf_gpipe.job.joining import join_job
what, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 60), limit))
join_job(8.0 if what == "stopped" else 60.0)
import torch, torch.distributed as dist
print("limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
dist.barrier()
if what in ("wait", "stopped"):
    time.sleep(600)
if os.environ["RANK"] == "1":
    if what == "killed":
        os.kill(os.getpid(), 9)
    raise {"fault": ValueError("boom"), "user": UserError("the key is wrong")}[what]
dist.all_reduce(torch.ones(1))
"""


def place(rank: int, port: int, *, has_machine: bool = False) -> dict[str, str]:
    """The environment of one of two processes, as srun or a shell script gives it: no launcher watches over them.

    With `has_machine` it stands for one on a machine of its own, and tells its failure itself.
    """
    local_rank, num_local = (0, 1) if has_machine else (rank, 2)
    variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "2"}
    variables |= {"LOCAL_WORLD_SIZE": str(num_local)}
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


class Scripts:
    """Starts one of two processes in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(
        self, rank: int, port: int, what: str = "none", limit: int = 0, *, has_machine: bool = False
    ) -> Program:
        self._count += 1
        variables = place(rank, port, has_machine=has_machine)
        return Program(self._folder / f"process-{self._count}", SCRIPT, what, str(limit), **variables)


@pytest.fixture
def script(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as any_socket:
        return int(any_socket.getsockname()[1])


def anew(what: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    """The script in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what, "0"],
        cwd=REPOSITORY,
        env={**ENVIRONMENT, **variables},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize(
    ("what", "exit_code", "line"),
    [("fault", 1, "error: process 1: ValueError: boom"), ("user", 2, "error: the key is wrong")],
)
def test_an_exception_that_a_script_does_not_catch(what: str, exit_code: int, line: str, script: Scripts) -> None:
    """Of a fault the interpreter itself tells; the other processes, here and in the other tests, are forked."""
    port = free_port()
    other = script(0, port, what)
    fails: Any = script(1, port, what) if what == "user" else anew(what, place(1, port))
    begin = time.monotonic()
    told = [process.communicate(timeout=200)[1] for process in (other, fails)]
    assert time.monotonic() - begin < 100
    assert [other.returncode, fails.returncode] == [1, exit_code]
    assert told[0] == "", "it has only lost its connection"
    assert told[1].splitlines()[-1] == line
    assert ("Traceback" in told[1]) == (what == "fault")
    assert told[1].count("error: ") == 1


def test_a_process_that_is_killed_and_has_no_launcher(script: Scripts) -> None:
    """Nobody but the others can tell it."""
    port = free_port()
    processes = [script(rank, port, "killed") for rank in range(2)]
    begin = time.monotonic()
    told = [process.communicate(timeout=200)[1] for process in processes]
    assert time.monotonic() - begin < 100
    assert [process.returncode for process in processes] == [1, -9]
    (line,) = told[0].splitlines()
    assert line.startswith("error: process 0: RuntimeError: lost the connection to another process (no failure of")
    assert told[1] == ""


def test_the_store_is_in_process_0_and_that_is_stopped(script: Scripts) -> None:
    """It can say nothing itself, so another one does."""
    port = free_port()
    processes = [script(rank, port, "stopped") for rank in range(2)]
    try:
        for process in processes:
            assert process.line().startswith("limit")
        time.sleep(1.0)
        processes[0].send_signal(signal.SIGSTOP)
        _, err = processes[1].communicate(timeout=100)
        assert processes[1].returncode == 1
        (line,) = err.splitlines()
        assert line.startswith("error: process 1: the process that has the store of this job has said nothing for ")
    finally:
        for process in processes:
            process.kill()


def test_a_store_that_is_silent_is_no_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes connections for a stopped process. A message of it may come late before its silence is noticed:
    then one of the others tells that, and of a store that is gone the process that had it has told the cause."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError, match="does not answer"):
            count_in_store("127.0.0.1", port, "key", 0.5)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setattr(failures, "_STORE_SECONDS", 0.5)
        monkeypatch.setattr(Job.current(), "store", object())
        first = {}
        for rank in "012":
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("LOCAL_RANK", rank)
            first[rank] = failures._is_first()
        assert first == {"0": False, "1": True, "2": False}
    with pytest.raises(ConnectionRefusedError):
        count_in_store("127.0.0.1", port, "key", 30.0)
    assert not failures._is_first()


def test_a_store_that_goes_while_it_is_asked_is_gone() -> None:
    """Process 0 may end after the connection of another one that fails: that one must not tell the cause again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Timer(0.5, server.shutdown, [socket.SHUT_RDWR]).start()
        with pytest.raises(ConnectionRefusedError):
            count_in_store("127.0.0.1", port, "key", 20.0)


def test_one_thread_of_a_process_tells_why_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread and the watch may find a silent store at the same moment."""
    monkeypatch.setattr(Job, "_current", Job())
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(joining.os, "_exit", lambda code: None)
    with failures.telling:
        watch = threading.Thread(target=joining._end, args=("it is silent", True, False))
        watch.start()
        failures.report(RuntimeError("waited in vain"))
    watch.join(60)
    assert re.fullmatch("error: process 0: RuntimeError: waited in vain\n", capsys.readouterr().err)


def test_a_port_that_is_in_use(script: Scripts) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        process = script(0, port)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    host = socket.gethostname()
    assert err == (
        f"error: MASTER_PORT is {port}, and on machine {host} another program, such as another run, has that port; "
        "give each run its own\n"
    )


def test_two_runs_that_are_given_the_same_port(script: Scripts) -> None:
    """Process 1 of the second would wait for five minutes, in the store of the first."""
    port = free_port()
    first = [script(rank, port, "wait") for rank in range(2)]
    try:
        assert first[0].line().startswith("limit")
        begin = time.monotonic()
        second = [script(rank, port, has_machine=True) for rank in range(2)]
        told = [process.communicate(timeout=250)[1] for process in second]
        assert time.monotonic() - begin < 150
        assert [process.returncode for process in second] == [2, 2]
        assert f"MASTER_PORT is {port}, and on machine" in told[0]
        assert f"the processes of another run have met at 127.0.0.1:{port}" in told[1]
        assert f"its main process is process {first[0].pid} on machine" in told[1]
        assert [one.count("\n") for one in told] == [1, 1]
        assert [process.poll() for process in first] == [None, None]
    finally:
        for process in first:
            process.kill()


def test_too_few_open_files(script: Scripts) -> None:
    """gloo aborts a process that may not open a connection."""
    process = script(0, free_port(), limit=70)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert err.startswith("error: process 0 may open 70 files, and each process of a job of 2 needs 80, for its")
    assert err.count("\n") == 1


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 200, reason="the system allows fewer")
def test_the_limit_of_open_files_is_raised_where_it_may_be(script: Scripts) -> None:
    port = free_port()
    processes = [script(rank, port, "fault", limit=200) for rank in range(2)]
    assert [process.communicate(timeout=200)[0] for process in processes] == ["limit 200\n"] * 2


def train_with_files(limit: int, words: list[str], folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    return train_forked(words, folder, 3)


def test_a_run_has_as_many_open_files_as_the_limit_allows(tmp_path: Path) -> None:
    """The number that is said is enough for a whole run: training, checkpoints, evaluation, pictures.

    Forked processes have at most those open that a new one has, and those to the process that they are forked from.
    """
    recipe = tiny_run.prepare(tmp_path)
    words = [str(recipe), f"training.output_dir={tmp_path / 'out'}"]
    process = Program(tmp_path, train_with_files, 88, words, tmp_path)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert (tmp_path / "out" / "metrics.json").exists()
