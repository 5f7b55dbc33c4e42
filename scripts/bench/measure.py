"""Measures one contender: seconds a step, the loss at the end, peak memory."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from bench import machine
from bench.contenders import CONTENDERS, Options
from bench.processes import Job, run_job
from bench.work import Work


@dataclass(frozen=True)
class Measured:
    """One run of a contender in fresh processes.

    Attributes:
        seconds: of a step, over all measured steps.
        first_loss: of the first step, from the initial weights; None where there is none to compare.
        last_loss: of the last step.
        peak_bytes: of each process, after the warm-up.
    """

    seconds: float
    first_loss: float | None
    last_loss: float | None
    peak_bytes: list[int]


def measure(contender: str, work: Work, options: Options, *, fork: bool = False) -> Measured:
    """Run a contender once."""
    job = {"contender": contender, "work": asdict(work), "options": asdict(options)}
    parts = run_job(_measure_process, job, CONTENDERS[contender].processes(options), fork=fork)
    losses = next((part["losses"] for part in parts if part["losses"][0] is not None), [None])
    seconds = max(part["seconds"] for part in parts)
    return Measured(seconds, losses[0], losses[-1], [part["peak_bytes"] for part in parts])


def _measure_process(job: Job) -> dict[str, Any]:
    """One process's part."""
    work, options = Work(**job["work"]), Options(**job["options"])
    contender = CONTENDERS[job["contender"]].load()(work, options, int(os.environ["RANK"]))
    losses = [contender.step() for _ in range(work.warmup_steps)]
    machine.reset_peak()
    _meet()
    start = time.perf_counter()
    losses += [contender.step() for _ in range(work.steps)]
    _meet()
    seconds = (time.perf_counter() - start) / work.steps
    return {"seconds": seconds, "losses": losses, "peak_bytes": machine.peak_bytes()}


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
