"""Runs one measurement in several processes of one job, one CPU thread each, and brings back what each returned.

Fresh processes share nothing with the measurement before. Forked ones start at once and share the memory of what this
process has imported: for a trial run, or for many processes that compute nothing.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

Job: TypeAlias = Mapping[str, Any]
"""The arguments of a measurement: plain values, as in JSON."""

GRACE_SECONDS = 2
#: Names the backend of torch.distributed in the processes of a job; without it, gloo.
BACKEND_VARIABLE = "HF_GPIPE_BENCH_BACKEND"


class JobFailedError(Exception):
    """A process of a measurement failed; the message is the end of what it wrote."""


def run_job(
    function: Callable[[Job], Any],
    job: Job,
    num_processes: int,
    *,
    fork: bool = False,
    timeout_seconds: float = 600,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(job)` in each process; the results in order of rank.

    Args:
        function: at the top of a module in this package; returns plain values.
        job: its argument.
        num_processes: they are joined by torch.distributed where there are several.
        fork: whether they are forks of this process, which must have started no thread.
        timeout_seconds: for all of it.
        variables: more environment variables of the processes.

    Raises:
        JobFailedError: a process failed or took too long.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-bench-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        start = _fork if fork else _start
        processes = [
            start(name, job, {**_environment(rank, num_processes, port), **(variables or {})}, Path(folder))
            for rank in range(num_processes)
        ]
        complaint = _wait(processes, time.monotonic() + timeout_seconds)
        results = [Path(folder) / f"{rank}.json" for rank in range(num_processes)]
        if complaint or not all(path.exists() for path in results):
            errors = "\n".join(path.read_text()[-2000:] for path in sorted(Path(folder).glob("*.err")))
            raise JobFailedError(f"{name} {json.dumps(job)}: {complaint or 'no result'}\n{errors}")
        return [json.loads(path.read_text()) for path in results]


def _environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """The variables of one process, as torchrun sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONWARNINGS": "ignore",
    }


def _start(name: str, job: Job, environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    scripts = str(Path(__file__).parents[1])
    path = os.pathsep.join(part for part in (scripts, os.environ.get("PYTHONPATH")) if part)
    with (folder / f"{environment['RANK']}.err").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.processes", name, json.dumps(job), str(folder)],
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def _fork(name: str, job: Job, environment: Mapping[str, str], folder: Path) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_forked, args=(name, job, environment, folder))
    process.start()
    return process  # type: ignore[return-value]  # the context's own subclass


def _forked(name: str, job: Job, environment: Mapping[str, str], folder: Path) -> None:
    os.environ.update(environment)
    try:
        _work(name, job, folder)
    except BaseException:
        (folder / f"{environment['RANK']}.err").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _wait(processes: list[Any], end: float) -> str | None:
    """Wait for the end of all; stop them all where one fails, and say what went wrong."""
    codes: list[int | None] = [None] * len(processes)
    complaint = None
    while complaint is None and any(code is None for code in codes):
        time.sleep(0.02)
        codes = [_exit_code(process) for process in processes]
        if any(codes):
            complaint = f"exit codes {codes}"
            time.sleep(GRACE_SECONDS)
        elif time.monotonic() > end:
            complaint = "took too long"
    for process in processes:
        if _exit_code(process) is None:
            process.kill()
        process.wait() if isinstance(process, subprocess.Popen) else process.join()
    return complaint


def _exit_code(process: Any) -> int | None:
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _work(name: str, job: Job, folder: Path) -> None:
    """Be one process of a job."""
    import torch
    import torch.distributed as dist

    rank, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    module, _, function = name.partition(":")
    run = getattr(importlib.import_module(module), function)
    if num_processes > 1:
        backend = os.environ.get(BACKEND_VARIABLE, "gloo")
        store, limit = f"file://{folder}/store", timedelta(seconds=300)
        dist.init_process_group(backend, store, rank=rank, world_size=num_processes, timeout=limit)
    (folder / f"{rank}.json").write_text(json.dumps(run(job)))
    if num_processes > 1:
        dist.all_reduce(torch.zeros(1))  # of the CPU, whatever the backend of a GPU
        dist.destroy_process_group()


if __name__ == "__main__":
    _work(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
