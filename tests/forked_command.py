"""Commands in processes that are forked from one that has imported everything: they start in no time.

`python -m hf_gpipe.train` itself, started as a user does, is run by tests/test_train.py and tests/test_malformed.py.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import tests.gloo  # noqa: F401  # it names the modules that the process to fork from imports
from scripts import forked
from tests.conftest import leave_out


def start(folder: Path, *words: str, num_processes: int = 2) -> BaseProcess:
    """Start `python -m hf_gpipe.train`; its output goes to `folder`/run.out and run.err.

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
