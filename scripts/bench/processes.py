"""Runs one measurement in the processes of one job, one CPU thread each, and brings back what each returned.

Spawned processes share nothing with the measurement before. Forked ones start at once and share the memory of what this
process has imported: for a trial run, or for many processes that compute nothing.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Names the backend of torch.distributed in the processes of a job; without it, gloo.
BACKEND_VARIABLE = "HF_GPIPE_BENCH_BACKEND"
_SCRIPTS = str(Path(__file__).parents[1])
#: Read when Python or a library starts, so this process has them while it starts the others.
_VARIABLES = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    **{"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"},
    **{"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"},
}


class JobFailedError(Exception):
    """A process of a measurement failed, or all took too long; the message is the end of its traceback."""


def run_job(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    num_processes: int,
    *,
    fork: bool = False,
    timeout_seconds: float = 600,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(*arguments)` in each process; the results in order of rank. All of them can be pickled.

    Args:
        function: at the top of a module.
        arguments: its arguments.
        num_processes: they are joined by torch.distributed where there are several.
        fork: whether they are forks of this process, which must have started no thread.
        timeout_seconds: for all of it.
        variables: more environment variables of the processes.

    Raises:
        JobFailedError: a process failed or took too long.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {**_VARIABLES, "MASTER_PORT": str(probe.getsockname()[1]), **(variables or {})}
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    shared["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [_SCRIPTS, *paths])))
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes))
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-bench-") as folder, patch.dict(os.environ, shared):
        given = (num_processes, Path(folder), function, arguments)
        method = "fork" if fork else "spawn"
        context = mp.start_processes(_work, given, num_processes, join=False, start_method=method)
        assert context is not None
        end = time.monotonic() + timeout_seconds
        try:
            while not context.join(1.0, grace_period=2.0):
                if time.monotonic() > end:
                    raise JobFailedError(f"{function.__name__}: took too long, more than {timeout_seconds:g} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise JobFailedError(f"{function.__name__}: {str(error).strip()[-2000:]}") from error
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(num_processes)]


def meet() -> None:
    """Wait for this process's GPU, if it uses one, and for the other processes of the job, if there are any."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # of the CPU, whatever the backend of a GPU


def in_turns(steps: Mapping[str, Callable[[], object]], count: int, warm_up: int = 1) -> dict[str, list[float]]:
    """In each process the seconds of functions that all processes call in turn, each `count` times after `warm_up`."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(count + warm_up):
        for name, step in steps.items():
            meet()
            start = time.perf_counter()
            step()
            meet()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _work(
    rank: int, num_processes: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Be one process of a job, as torchrun starts it. Only errors are printed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)  # a fork of pytest has pytest's own
    torch.set_num_threads(1)
    if num_processes > 1:
        backend = os.environ.get(BACKEND_VARIABLE, "gloo")
        limit = timedelta(seconds=300)
        dist.init_process_group(backend, f"file://{folder}/store", limit, num_processes, rank)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*arguments)))
    if num_processes > 1:
        meet()
        dist.destroy_process_group()
