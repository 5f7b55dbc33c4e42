"""Runs a test's function in several processes joined by gloo, and brings back what each of them returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests import fork_server

TIMEOUT = timedelta(seconds=60)
#: A backend that has gloo for CUDA tensors alone and refuses CPU tensors, as NCCL does.
NO_CPU = "no_cpu"

# Processes are forked from one that has imported everything, and has no thread and no device: starting takes no time.
multiprocessing.set_forkserver_preload(["tests.preloaded"])
fork_server.join()


def run_gloo(function: Callable[..., Any], num_processes: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """Call `function(*args)` in every process of a gloo job on this machine; the results in order of rank.

    `function` must be importable (defined at the top of a test module). An exception in a process is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)  # that process may have another
        mp.start_processes(
            _worker,
            (num_processes, folder, environment, backend, function, args),
            num_processes,
            start_method="forkserver",
        )
        return [pickle.loads((Path(folder) / f"{rank}.pickle").read_bytes()) for rank in range(num_processes)]


def _worker(
    rank: int,
    num_processes: int,
    folder: str,
    environment: dict[str, str],
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.Backend.register_backend(NO_CPU, _gloo, devices=["cuda"])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_processes, timeout=TIMEOUT)
    result = function(*args)
    (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    if backend == "gloo":
        dist.barrier()
    dist.destroy_process_group()


def _gloo(store: dist.Store, rank: int, num_processes: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, num_processes, timeout)
