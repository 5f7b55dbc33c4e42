"""`python -m hf_gpipe.train` in processes that are forked from one that has imported everything: they start in no time.

The command itself, started as a user does, is run by tests/test_train.py and tests/test_malformed.py.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from hf_gpipe.training import cost
from scripts import chaos
from tests import gloo  # it says what that process imports

__all__ = ["gloo", "start", "start_worker"]


def start(folder: Path, *words: str, num_processes: int = 2) -> BaseProcess:
    """Start the command; its output goes to `folder`/run.out and run.err.

    Args:
        folder: an existing one.
        words: recipe and overrides.
        num_processes: that the command will start.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(folder, words, num_processes, dict(os.environ))
    )
    process.start()
    return process


def start_worker(folder: Path, *words: str, **environment: str) -> BaseProcess:
    """Start one process of the command's job, as torchrun does with these variables; its output goes to `folder`."""
    process = multiprocessing.get_context("forkserver").Process(
        target=_work, args=(folder, words, {**os.environ, **environment})
    )
    process.start()
    return process


def _work(folder: Path, words: tuple[str, ...], environment: dict[str, str]) -> None:
    _settle(folder, environment)
    sys.exit(chaos.train(list(words)))


def _run(folder: Path, words: tuple[str, ...], num_processes: int, environment: dict[str, str]) -> None:
    _settle(folder, environment)
    sys.exit(chaos.train_forked(words, folder, num_processes))


def _settle(folder: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in ((1, "run.out"), (2, "run.err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    cost._predicted = lambda pipe, batches: {}  # see conftest.py
