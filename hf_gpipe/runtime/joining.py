"""How commands and scripts join their job: with what tells and ends the faults that nothing else would."""

from __future__ import annotations

from collections.abc import Mapping

from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.runtime.job import Job, in_job
from hf_gpipe.runtime.started import note_launcher
from hf_gpipe.runtime.uncaught import tell_uncaught
from hf_gpipe.runtime.watching import watch


def join_job(
    timeout_seconds: float = PipelineConfig.timeout_seconds,
    threads: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> Job:
    """`Job.join`, and in a process of several also the watch (watching.py) and the hook for exceptions (uncaught.py).

    Raises:
        UserError: as `Job.join`.
    """
    note_launcher()
    if in_job():
        tell_uncaught()
        watch()
    job = Job.join(timeout_seconds, threads, settings)
    if in_job():
        # torch puts a hook of its own before ours, which keeps what is printed there until it returns.
        tell_uncaught()
    return job
