"""How every command and script joins its job, with what tells and ends the faults that nothing else would."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_gpipe.job.job import Job, available_cores, in_job
from hf_gpipe.job.started import note_launcher
from hf_gpipe.job.uncaught import tell_uncaught
from hf_gpipe.job.watching import watch
from hf_gpipe.recipe import PipelineConfig


def join_job(
    timeout_seconds: float = PipelineConfig.timeout_seconds,
    threads: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> Job:
    """Join the job that a launcher started this process for. Without one, or a second time, nothing is joined.

    It works the same in the processes of `hf_gpipe.job.launch` and in those of torchrun, `accelerate launch` and
    srun. The process ends at once when its launcher is gone, and on SIGINT, even while it waits for a message. A
    process of several also gets the watch (watching.py) and the hook for exceptions (uncaught.py).

    Args:
        timeout_seconds: how long a process waits for another one, once all have started, before the run fails.
        threads: CPU threads of this process; None: OMP_NUM_THREADS, or its share of this machine's cores.
        settings: values that must be the same in every process, by their names. They are also compared in a
            process group that was there before; None: there nothing is checked.

    Raises:
        UserError: on every process: they differ, or their machines do not reach each other (job/preflight.py); the
            port is in use; the limit of open files is too low.
    """
    note_launcher()
    if in_job():
        tell_uncaught()
        watch()
    job = Job.current()
    is_new = in_job() and not dist.is_initialized()
    if is_new and threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if threads is not None:
        torch.set_num_threads(threads)
    if is_new:
        job.meet(timedelta(seconds=timeout_seconds), settings or {})
    elif settings is not None and dist.is_initialized() and dist.get_world_size() > 1:
        job.compare(settings)
    if in_job():
        # torch puts a hook of its own before ours, which keeps what is printed there until it returns.
        tell_uncaught()
    return job
