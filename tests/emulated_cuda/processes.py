"""Tests on emulated CUDA devices: each runs in processes forked from one that has loaded the devices, torch and more.

The process of pytest has torch without the devices, so it starts one server process, which forks for each test.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import fork_server
from tests.emulated_cuda.__main__ import ROOT, environment
from tests.emulated_cuda.build import NoCompilerError, NoDeviceError, library

Function = TypeVar("Function", bound=Callable[..., Any])

#: Seconds after which the processes of a test are ended, and of them the seconds in which none has computed. pytest
#: itself is ended after 300 (pyproject.toml).
TIMEOUT, STALL = 240.0, 100.0
#: What the tests import. A forked process has it at once.
PRELOADED = (
    *("hf_gpipe.from_recipe.job", "hf_gpipe.training.trainer", "hf_gpipe.planner.decide", "tests.oracle", "pytest"),
    *("hypothesis", "peft", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "marian", "t5"))),
)


@dataclass(frozen=True)
class Request:
    """A test to run: a function of a module with its arguments, in a number of processes.

    Attributes:
        timeout: seconds after which the processes are ended and the test has failed.
        stall: the same, of seconds in which none of them has computed.
        environment: of the process of pytest, which a test may have changed.
    """

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_processes: int
    timeout: float
    stall: float
    environment: dict[str, str]


class EmulatedError(AssertionError):
    """A test failed on the emulated devices; the message has its traceback."""


def on_emulated_cuda(num_processes: int = 1, timeout: float = TIMEOUT) -> Callable[[Function], Function]:
    """Decorator of a test: its body runs on emulated CUDA devices.

    Its arguments must be picklable. In several processes, the body runs in each of them as one job of
    torch.distributed, with gloo for the CPU and a stand-in for NCCL.

    Args:
        num_processes: number of processes of the job.
        timeout: seconds after which they are ended and the test has failed.
    """

    def decorate(test: Function) -> Function:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            if is_here():
                test(*args, **kwargs)
            else:
                run_emulated(test, num_processes, *args, timeout=timeout, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def run_emulated(
    function: Callable[..., Any],
    num_processes: int,
    *args: Any,
    timeout: float = TIMEOUT,
    stall: float = STALL,
    **kwargs: Any,
) -> list[Any]:
    """Call a function of a test module on emulated CUDA devices; returns its results by rank.

    Args:
        function: at the top of a test module.
        num_processes: as of `on_emulated_cuda`.
        args: of the function, picklable.
        timeout: as of `on_emulated_cuda`.
        stall: the same for seconds in which no process has computed: for a test that expects a deadlock.
        kwargs: of the function.

    Raises:
        EmulatedError: it failed in one of the processes, or took too long.
    """
    request = Request(
        function.__module__, function.__qualname__, args, kwargs, num_processes, timeout, stall, dict(os.environ)
    )
    server = _server()
    server.send_bytes(pickle.dumps(request))
    results, output, failure = pickle.loads(server.recv_bytes())
    print(output, end="")
    if failure is not None:
        raise EmulatedError(failure)
    return [pickle.loads(result) for result in results]


def is_here() -> bool:
    """Whether this process has the devices."""
    from tests.emulated_cuda.native import is_loaded

    return is_loaded()


def check_available() -> None:
    """Build the device. Skips the test where that is impossible; a missing compiler is an error in CI."""
    try:
        library("device")
    except NoDeviceError as error:
        if isinstance(error, NoCompilerError) and (os.environ.get("CI") or os.environ.get("HF_GPIPE_CI")):
            raise
        pytest.skip(str(error))


@cache
def _server() -> Connection:
    """The server of this process, started the first time, or that of all workers of `pytest -n`."""
    library("device")
    if (address := os.environ.get(fork_server.EMULATED)) is not None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)
            return Connection(client.detach())
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-m", "tests.emulated_cuda.processes", str(there.fileno())]
    variables = environment(os.environ)
    subprocess.Popen(command, cwd=ROOT, env=variables, pass_fds=[there.fileno()])
    there.close()
    return here


# ---------------------------------------------------------------------- in the server and the processes that it forks


def preload() -> None:
    """Import what the processes that this one forks import."""
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    _observe()
    gc.freeze()  # else each child looks at all that is imported, and gets pages of its own for it
    gc.set_threshold(50_000, 20, 10)  # as in tests/conftest.py
    gc.enable()


def _observe() -> None:
    """Fill the caches that the library and the adapters have in a process. A backward would start a thread of each
    device, and a process with threads must not be forked, so none runs here."""
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from hf_gpipe.adapters import adapter_for
    from tests.emulated_cuda.models import config_of

    get_checkpoint_conversion_mapping("llama")  # it compiles a thousand patterns
    for family, dropout in product(("llama", "marian", "t5"), (0.0, 0.2)):
        adapter_for(config_of(family, dropout=dropout), torch.float64)


def serve_all(listener: int, alive: int) -> None:
    """Serve each process of pytest that connects to a socket in a fork of this process, until nobody has `alive`."""
    preload()
    with socket.socket(fileno=listener) as waiting:
        while alive not in select.select([waiting, alive], [], [])[0]:
            connection = Connection(waiting.accept()[0].detach())
            if os.fork() == 0:
                waiting.close()
                _serve(connection)
                os._exit(0)
            connection.close()


def _serve(connection: Connection) -> None:
    """Run tests until the process of pytest has ended."""
    while True:
        try:
            request: Request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run(request)))


def _run(request: Request) -> tuple[list[bytes], str, str | None]:
    """The results of the processes, pickled, what they printed, and a failure."""
    results: dict[int, bytes] = {}
    failure = None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        processes: dict[Connection, tuple[int, int]] = {}
        for rank in range(request.num_processes):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            process = os.fork()
            if not process:
                receiver.close()
                _work(request, rank, folder, output.fileno(), sender)
            sender.close()
            processes[receiver] = rank, process
        start = last = time.monotonic()
        computed = 0
        while processes and failure is None:
            ready = wait(list(processes), 0.2)
            now = time.monotonic()
            if (ticks := sum(map(_ticks, (one for _, one in processes.values())))) != computed:
                computed, last = ticks, now
            if not ready and (now > start + request.timeout or now > last + request.stall):
                ranks = sorted(rank for rank, _ in processes.values())
                failure = f"processes {ranks} had not ended after {now - start:.1f} s"
                failure += "".join(_stack(folder, *one) for one in sorted(processes.values()))
            for receiver in ready:
                rank, process = processes.pop(receiver)  # type: ignore[index]
                try:
                    is_well, results[rank] = receiver.recv()  # type: ignore[union-attr]
                except EOFError:
                    failure = f"process {rank} of {request.num_processes} died"
                else:
                    if not is_well:
                        failure = f"process {rank} of {request.num_processes}:\n{results[rank].decode()}"
                os.waitpid(process, 0)
        for _, process in processes.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        output.seek(0)
        printed = output.read()
    return [results[rank] for rank in sorted(results)], printed, failure


def _ticks(process: int) -> int:
    """How long the main thread of a process has computed, in the system's ticks."""
    values = Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
    return int(values[11]) + int(values[12])


def _stack(folder: str, rank: int, process: int) -> str:
    """Where a process waits."""
    file = Path(folder) / f"stack of {rank}"
    os.kill(process, signal.SIGUSR1)
    end = time.monotonic() + 5
    while time.monotonic() < end and not (file.exists() and "_serve" in file.read_text()):  # which is the last line
        time.sleep(0.02)
    return f"\nprocess {rank}: {file.read_text() if file.exists() else 'has not started'}"


def _work(request: Request, rank: int, folder: str, output: int, sender: Connection) -> None:
    """Run the function in a forked process, send its result, and end."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, (Path(folder) / f"stack of {rank}").open("w"), all_threads=False)
    try:
        outcome = True, pickle.dumps(_call(request, rank, folder))
    except BaseException:
        outcome = False, traceback.format_exc().encode()
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send(outcome)
    os._exit(0)


def _call(request: Request, rank: int, folder: str) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environment(request.environment))
    torch.set_num_threads(1)
    if request.num_processes > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(request.num_processes)}
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=store,
            rank=rank,
            world_size=request.num_processes,
            timeout=timedelta(seconds=10 * request.timeout),  # the process is ended before
        )
    function: Any = importlib.import_module(request.module)
    for name in request.name.split("."):
        function = getattr(function, name)
    result = function(*request.args, **request.kwargs)
    if request.num_processes > 1:
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()
    return result


if __name__ == "__main__":
    # Pickles name this module, not __main__.
    processes = importlib.import_module("tests.emulated_cuda.processes")
    processes.preload()
    processes._serve(Connection(int(sys.argv[1])))
