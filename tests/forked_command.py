"""Commands in processes that are forked from one that has imported everything: they start in no time.

`python -m hf_gpipe.train` itself, started as a user does, is run by tests/test_train.py and tests/test_malformed.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.gloo  # noqa: F401  # it names the modules that the process to fork from imports
from scripts import chaos
from tests.conftest import leave_out


def start(folder: Path, *words: str, num_processes: int = 2) -> BaseProcess:
    """Start `python -m hf_gpipe.train`; its output goes to `folder`/run.out and run.err.

    Args:
        folder: an existing one.
        words: recipe and overrides.
        num_processes: that the command will start.
    """
    return start_function(folder, chaos.train_forked, words, folder, num_processes)


def start_worker(folder: Path, *words: str, **variables: str) -> BaseProcess:
    """Start one process of the command's job, as torchrun does, with these environment variables."""
    return start_function(folder, chaos.train, list(words), variables=variables)


def start_function(
    folder: Path, function: Callable[..., int], *args: Any, variables: Mapping[str, str] | None = None
) -> BaseProcess:
    """The same for a function that returns an exit code; it must be importable."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(folder, function, args, {**os.environ, **(variables or {})})
    )
    process.start()
    return process


def _run(folder: Path, function: Callable[..., int], args: tuple[Any, ...], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    for descriptor, name in ((1, "run.out"), (2, "run.err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    leave_out(pytest.MonkeyPatch())
    sys.exit(function(*args))
