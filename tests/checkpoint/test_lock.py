"""One run at a time has an output directory, however its owner ends and on whatever file system it is."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.checkpoint import lock
from hf_gpipe.checkpoint.lock import LOCK_FILE, owned, this_process
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.job.world import World
from tests import gloo
from tests.forked_command import Program
from tests.training.toy import trainer

ALONE = World.current()


def _hold(folder: Path, ready: Any) -> None:
    with owned(folder, ALONE):
        ready.set()
        time.sleep(300)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[BaseProcess]:
    """A process that has the directory `tmp_path`."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(120)
    yield process
    process.kill()
    process.join()


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "ENDING_SECONDS", 0.3)
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.2)


def elsewhere(folder: Path) -> Path:
    """The file of an owner on another machine, which this kernel does not know."""
    (folder / LOCK_FILE).write_text(json.dumps(this_process() | {"host": "b", "boot": "another", "process": 77}))
    return folder / LOCK_FILE


def test_a_second_run_is_told_who_has_the_directory(tmp_path: Path, holder: BaseProcess, is_quick: None) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != LOCK_FILE}
    with pytest.raises(UserError, match=rf"process {holder.pid} on machine .*, since 20.*choose another"):
        owned(tmp_path, ALONE).__enter__()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != LOCK_FILE} == before
    assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == holder.pid


def test_what_a_killed_run_leaves_stops_nobody(tmp_path: Path, holder: BaseProcess) -> None:
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    begin = time.monotonic()
    with owned(tmp_path, ALONE):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()
    assert time.monotonic() - begin < lock.SILENT_SECONDS / 2
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_run_that_ends_is_waited_for(tmp_path: Path, holder: BaseProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that was killed is gone half a second before its processes are."""
    monkeypatch.setattr(lock, "ENDING_SECONDS", 100.0)
    assert holder.pid is not None
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {holder.pid}"])
    with owned(tmp_path, ALONE):
        assert killer.wait() == 0


def test_a_trainer_inside_of_a_run_has_its_directory(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with owned(tmp_path / "out", ALONE):
        with owned(tmp_path / "link", ALONE):
            assert (tmp_path / "out" / LOCK_FILE).exists()
        assert (tmp_path / "out" / LOCK_FILE).exists()
    assert not (tmp_path / "out" / LOCK_FILE).exists()


def test_it_is_given_back_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), owned(tmp_path, ALONE):
            raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_an_owner_on_another_machine_that_is_there(tmp_path: Path, is_quick: None) -> None:
    file = elsewhere(tmp_path)
    toucher = subprocess.Popen(["sh", "-c", f"while sleep 0.2; do touch {file}; done"])
    try:
        with pytest.raises(UserError, match="the run of process 77 on machine b, since"):
            owned(tmp_path, ALONE).__enter__()
    finally:
        toucher.kill()
    assert json.loads(file.read_text())["process"] == 77


@pytest.mark.parametrize("is_locked", [False, True])
def test_an_owner_on_another_machine_that_is_lost(
    is_locked: bool, tmp_path: Path, is_quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lock may outlive it on the server of a network file system."""
    file = elsewhere(tmp_path)
    with file.open() as other:
        if is_locked:
            lock.fcntl.flock(other, lock.fcntl.LOCK_EX)
        begin = time.monotonic()
        with owned(tmp_path, ALONE):
            assert time.monotonic() - begin > lock.SILENT_SECONDS
            assert json.loads(file.read_text())["process"] == os.getpid()
    assert "waiting up to 1.5 seconds" in capsys.readouterr().err


def test_a_file_system_without_locks(
    tmp_path: Path, holder: BaseProcess, is_quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    toucher = subprocess.Popen(["sh", "-c", f"while sleep 0.2; do touch {tmp_path / LOCK_FILE}; done"])
    with pytest.raises(UserError, match=f"process {holder.pid}"):
        owned(tmp_path, ALONE).__enter__()
    toucher.kill()
    toucher.wait()
    holder.kill()
    with owned(tmp_path, ALONE):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"host": 1}', b"null"])
def test_a_file_that_names_nobody(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    with owned(tmp_path, ALONE):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    names = ("file", "file/below", "loop", "/proc/none", "a\0b", "a" * 300)
    for path in (tmp_path / name for name in names):
        with pytest.raises(CheckpointError, match="cannot write into the directory"):
            owned(path, ALONE).__enter__()


CHILD = """
import os, sys
from pathlib import Path
from hf_gpipe.checkpoint.lock import owned
from hf_gpipe.job.world import World
with owned(Path(sys.argv[1]), World.current()):
    if os.fork() == 0:
        os.close(1)
        os.execvp("sleep", ["sleep", "60"]) if sys.argv[2] == "program" else __import__("time").sleep(60)
    print("ready", flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("kind", ["fork", "program"])
def test_a_child_that_outlives_its_run_does_not_keep_the_lock(kind: str, tmp_path: Path) -> None:
    """Such as a data loader's worker."""
    out, _ = Program(tmp_path / "process", CHILD, str(tmp_path), kind).communicate(timeout=200)
    assert out == "ready\n"
    with owned(tmp_path, ALONE):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()


RETURNS = """
import sys, time
from pathlib import Path
from hf_gpipe.checkpoint import lock
from hf_gpipe.job.world import World
lock.BEAT_SECONDS = 0.2
with lock.owned(Path(sys.argv[1]), World.current()):
    print("ready", flush=True)
    time.sleep(100)
"""


def test_a_run_that_was_given_up_ends_when_it_comes_back(tmp_path: Path) -> None:
    process = Program(tmp_path / "process", RETURNS, str(tmp_path))
    assert process.line() == "ready\n"
    (tmp_path / LOCK_FILE).unlink()
    elsewhere(tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "process 77 on machine b" in err
    assert "has taken the directory over" in err
    assert (tmp_path / LOCK_FILE).exists(), "it is the other's"


def test_a_trainer_takes_it(tmp_path: Path, holder: BaseProcess, is_quick: None) -> None:
    made = trainer(tmp_path, max_steps=1)
    with pytest.raises(UserError, match=f"process {holder.pid} on machine"):
        made.train()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE], "nothing else is written"
    holder.kill()
    made.train()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def _second(folder: Path) -> str:
    lock.ENDING_SECONDS = 0.3
    try:
        with owned(folder, World.current()):
            return "taken"
    except UserError as error:
        return str(error)


def test_every_process_of_the_second_run_is_told(tmp_path: Path, holder: BaseProcess) -> None:
    first, second = gloo.run_gloo(_second, 2, tmp_path)
    assert first == second
    assert f"process {holder.pid}" in first


def test_the_main_process_alone_takes_it(tmp_path: Path) -> None:
    assert gloo.run_gloo(_second, 2, tmp_path) == ["taken", "taken"]
    assert list(tmp_path.iterdir()) == []
