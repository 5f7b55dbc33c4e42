"""Programs of two processes that meet, and of a peer that nobody has invited, for test_secret.py."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_gpipe.job import failures
from hf_gpipe.job.job import Job
from hf_gpipe.job.joining import join_job
from hf_gpipe.job.world import World


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def rank(folder: Path) -> int:
    """A process of the run."""
    try:
        job = join_job(30.0)
        world = World.current()
        total = world.all_reduce(torch.ones(2))
        found = world.gather_objects(f"of {world.rank}")
        (folder / f"found-{world.rank}").write_text(f"{found} {total.tolist()}")
        while (folder / "stay").exists():
            time.sleep(0.05)
        job.leave()
    except Exception as error:
        code = failures.report(error)
        os._exit(code)
    return 0


def uninvited(folder: Path) -> int:
    """Says it is rank 1, as the real one would, and sends an object that runs code where it is unpickled."""
    os.environ.pop("HF_GPIPE_SECRET", None)
    join_job(30.0)
    group = Job.current().common_group("gloo")
    dist.all_reduce(torch.ones(2), group=group)
    dist.all_gather_object([None, None], Runs(folder / "executed"), group=group)
    return 0


def start(what: str, folder: Path) -> int:
    """Run a process of this name; the "rank of few files" begins with the usual limit of open files."""
    if what == "rank of few files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return uninvited(folder) if what == "uninvited" else rank(folder)
