"""Processes forked from one that has imported everything, so that they start in no time; and the command in them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from hf_gpipe.job import launch
from hf_gpipe.planner.costs.measure import this_machine
from hf_gpipe.train import main as train


class Forked:
    """A process forked off this one, with what `hf_gpipe.job.launch` needs of subprocess.Popen."""

    def __init__(self, function: Callable[[], int], log: Path | None = None) -> None:
        self._exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, log)

    @staticmethod
    def _run(function: Callable[[], int], log: Path | None) -> NoReturn:
        os.setsid()
        # Makes torch's pool of threads anew. Else autograd's threads do, and where two of them do at once, one aborts.
        torch.set_num_threads(torch.get_num_threads())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if log is not None:
            for descriptor, suffix in ((1, ".out"), (2, ".err")):
                os.dup2(os.open(log.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
        try:
            code = function()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def wait(self, seconds: float = 600.0) -> int | None:
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def train_forked(
    words: Sequence[str], folder: Path, num_processes: int, prepare: Callable[[int], None] = lambda rank: None
) -> int:
    """Run the command in this process, with its processes forked; each calls `prepare` with its rank first."""

    def worker(rank: int) -> int:
        prepare(rank)
        return train(list(words))

    fork_ahead(worker, folder, num_processes)
    return train(list(words))


def fork_ahead(worker: Callable[[int], int], folder: Path, num_processes: int) -> None:
    """Fork the processes that `hf_gpipe.job.launch` will start: they call `worker` with their rank.

    They are forked before the launcher starts a thread, whose locks they would inherit, and wait for their environment.
    Their numbers are written to the file `pids` in the folder.
    """

    start = forked_ahead(worker, num_processes, folder / "pids")
    launch.start = lambda command, environment: start(environment)  # type: ignore[assignment]


def forked_ahead(
    worker: Callable[[int], int], num_processes: int, pids: Path | None = None
) -> Callable[[dict[str, str]], Forked]:
    """Fork processes that wait for their environment: the function gives it to the next one, which then works.

    Args:
        worker: what a process does, from its rank to its exit code.
        num_processes: how many there are.
        pids: a file for their numbers.
    """

    def wait_and_work(pipe: int, own: int) -> int:
        # Else it would wait for ever where the launcher ends without it.
        for write in (own, *(other for _, other in waiting)):
            os.close(write)
        with os.fdopen(pipe) as file:
            environment = json.loads(file.readline() or "null")
        if environment is None:
            return 0  # the launcher has ended without it
        os.environ.update(environment)
        return worker(int(environment["RANK"]))

    waiting: list[tuple[Forked, int]] = []
    for _ in range(num_processes):
        read, write = os.pipe()
        waiting.append((Forked(partial(wait_and_work, read, write)), write))
        os.close(read)
    if pids is not None:
        pids.write_text("".join(f"{process.pid}\n" for process, _ in waiting))

    def start(environment: dict[str, str]) -> Forked:
        process, pipe = waiting.pop(0)
        os.write(pipe, json.dumps(environment).encode() + b"\n")
        return process

    return start


def fork_ahead_of_torchrun(worker: Callable[[int], int], num_processes: int) -> None:
    """The same for the processes that torchrun's agent in this process will start."""
    start = forked_ahead(worker, num_processes)

    def started(handler: SubprocessHandler, args: Sequence[str], environment: dict[str, str]) -> Forked:
        return start(environment)

    SubprocessHandler._popen = started  # type: ignore[assignment,method-assign]


def import_ahead(num_processes: int) -> None:
    """Let the processes that are forked from this one find what a training imports late, and how fast this machine is
    where so many processes compute."""
    torch.set_num_threads(1)
    for module in (
        "hf_gpipe.from_recipe.job",
        "matplotlib.backends.backend_agg",
        "matplotlib.font_manager",
        "sacrebleu",
    ):
        importlib.import_module(module)
    this_machine(torch.device("cpu"), num_processes)


def stuck() -> None:
    """Wait for ever."""
    while True:
        time.sleep(3600)
