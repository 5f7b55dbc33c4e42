"""Commands and programs in processes that are forked from one that has imported everything: they start in no time.

`hf-gpipe train` itself, as a user starts it, is run by tests/test_train.py and tests/test_malformed.py, and
a script whose exceptions the interpreter tells by tests/job/test_start.py.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch.distributed import run as elastic
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

import tests.gloo  # noqa: F401  # it names the modules that the process to fork from imports
from scripts import forked
from tests.conftest import leave_out


def start(folder: Path, *words: str, num_processes: int = 2) -> BaseProcess:
    """Start `hf-gpipe train`; its output goes to `folder`/run.out and run.err.

    Args:
        folder: an existing one.
        words: recipe and overrides.
        num_processes: that the command will start.
    """
    return start_function(folder, forked.train_forked, words, folder, num_processes)


def start_worker(folder: Path, *words: str, **variables: str) -> BaseProcess:
    """Start one process of the command's job, as torchrun does, with these environment variables."""
    return start_function(folder, forked.train, list(words), variables=variables)


def start_function(
    folder: Path, function: Callable[..., int], *args: Any, variables: Mapping[str, str] | None = None
) -> BaseProcess:
    """The same for a function that returns an exit code; it must be importable."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(folder, function, args, {**os.environ, **(variables or {})})
    )
    process.start()
    return process


def without_collector(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that starts as a user does, and others: see tests/no_collector/sitecustomize.py."""
    paths = [str(Path(__file__).parent / "no_collector"), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Program:
    """`python -c text words...` in a forked process, with what tests use of subprocess.Popen; it has no standard input.

    Args:
        folder: for its output; it is made.
        text: the program, or an importable function that returns an exit code.
        words: the program's `sys.argv` after the first, or the function's arguments.
        variables: added to this process's environment.
    """

    def __init__(self, folder: Path, text: str | Callable[..., int], *words: Any, **variables: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        function, args = (run_text, (text, words)) if isinstance(text, str) else (text, words)
        self._process = start_function(folder, function, *args, variables=variables)
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def line(self, seconds: float = 120.0) -> str:
        """The first line that it prints, once it is there; "" where the process has ended without one."""
        deadline = time.monotonic() + seconds
        while "\n" not in (text := self._text("out")) and self.poll() is None:
            assert time.monotonic() < deadline, self._text("err")
            time.sleep(0.01)
        return text[: text.find("\n") + 1] or self._text("out")

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; all that it has written to stdout and stderr."""
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self._text("out"), self._text("err")

    def _text(self, name: str) -> str:
        path = self._folder / f"run.{name}"
        return path.read_text() if path.exists() else ""


def run_text(text: str, words: Sequence[str]) -> int:
    """Run a program as the interpreter does, with what that does of exceptions and at the end."""
    sys.argv = ["-c", *words]
    code = 0
    try:
        try:
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        except Exception:
            code = 1
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    except SystemExit as error:  # of the program, or of the hook
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


def run_script(words: Sequence[str], *, is_module: bool = False) -> int:
    """As `python words...` does, or `python -m words...`."""
    sys.argv = [*words]
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0


def torchrun(words: Sequence[str], work: Callable[[int], int] | None = None) -> int:
    """torchrun, in this process, with its processes forked from it.

    Args:
        words: its options, the script, and the script's.
        work: what each process does, from its rank to its exit code; None: it runs the script.
    """
    torch.set_num_threads(1)
    given = elastic.get_args_parser().parse_args([*words])
    script = partial(run_script, [given.training_script, *given.training_script_args], is_module=given.module)
    start = forked.forked_ahead(work or (lambda rank: script()), int(given.nproc_per_node))
    SubprocessHandler._popen = lambda handler, args, environment: start(environment)  # type: ignore
    elastic.main([*words])
    return 0


#: It asks `torchrun_in_path` for a launcher in a forked process, hands SIGTERM on, and prints what that has printed.
TORCHRUN = """#!/bin/sh
asked=$(mktemp -d "$(dirname "$0")/asked.XXXXXX")
trap 'kill -TERM "$(cat "$asked/pid")"' TERM
printf '%s\\n' "$PWD" "$@" > "$asked/words"
env -0 > "$asked/environment.part"
mv "$asked/environment.part" "$asked/environment"
while [ ! -e "$asked/code" ]; do sleep 0.05; done
cat "$asked/run.out"
cat "$asked/run.err" >&2
exit "$(cat "$asked/code")"
"""


@contextmanager
def torchrun_in_path(folder: Path) -> Iterator[str]:
    """Context manager with a search path for commands, of which `torchrun` is this module's.

    Args:
        folder: an empty one, for the program and what its processes print.
    """
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    is_over = threading.Event()
    serving = threading.Thread(target=_serve, args=(folder, is_over))
    serving.start()
    try:
        yield os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    finally:
        is_over.set()
        serving.join()


def _serve(folder: Path, is_over: threading.Event) -> None:
    """Start the launchers that are asked for, until nobody asks any more, and say how they end."""
    launchers: dict[Path, BaseProcess] = {}
    while not is_over.wait(0.02):
        for asked in folder.glob("asked.*/environment"):
            variables = dict(line.split("=", 1) for line in asked.read_text().split("\0") if line)
            words = (asked.parent / "words").read_text().splitlines()
            launchers[asked.parent] = start_function(asked.parent, _torchrun_in, *words, variables=variables)
            (asked.parent / "pid").write_text(str(launchers[asked.parent].pid))
            asked.unlink()
        for own in [own for own, launcher in launchers.items() if launcher.exitcode is not None]:
            (own / "code.part").write_text(str(launchers.pop(own).exitcode))
            (own / "code.part").rename(own / "code")
    for launcher in launchers.values():
        launcher.kill()


def _torchrun_in(folder: str, *words: str) -> int:
    os.chdir(folder)
    return torchrun(words)


def accelerate(words: Sequence[str], work: Callable[[], int] | None = None) -> int:
    """`accelerate launch` on a CPU, in this process, with its one process forked from it.

    Args:
        words: its options, the script, and the script's.
        work: what the process does, and its exit code; None: it runs the script.
    """
    from accelerate.commands import launch

    def simple_launcher(given: argparse.Namespace) -> None:
        _, environment = launch.prepare_simple_launcher_cmd_env(given)
        os.environ.update(environment)
        script = [given.training_script, *given.training_script_args]
        sys.exit(forked.Forked(work or (lambda: run_script(script))).wait())

    launch.simple_launcher = simple_launcher
    launch.launch_command(launch.launch_command_parser().parse_args([*words]))
    return 1  # it has started something else


class Training:
    """A training command in a forked process, in place of the subprocess.Popen of scripts/translation_scaling.

    Args:
        arguments: of a command that computes in one process.
        log: for what it prints.
    """

    def __init__(self, arguments: Sequence[str], log: TextIO) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_train_into, args=(list(arguments), log.name, dict(os.environ)))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("train", seconds or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)


def _train_into(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    os.setsid()
    _prepare({1: Path(log), 2: Path(log)}, environment, os.O_APPEND)
    sys.exit(forked.train(arguments))


def _run(folder: Path, function: Callable[..., int], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    _prepare({1: folder / "run.out", 2: folder / "run.err"}, environment, os.O_TRUNC)
    sys.exit(function(*args))


def _prepare(files: Mapping[int, Path], environment: dict[str, str], flags: int) -> None:
    os.environ.clear()
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    for descriptor, path in files.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644), descriptor)
    leave_out(pytest.MonkeyPatch())
