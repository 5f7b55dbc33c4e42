"""Measures one contender: seconds a step, its losses, peak memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from bench import machine
from bench.contenders import CONTENDERS, Options
from bench.processes import meet, run_job
from bench.work import Work


@dataclass(frozen=True)
class Measured:
    """One run of a contender in fresh processes.

    Attributes:
        seconds: of a step, over all measured steps.
        losses: of all steps, the first one's from the initial weights; empty where there are none to compare.
        peak_bytes: of each process, after the warm-up.
        planned_bytes: the same by the planner, where that has a plan.
    """

    seconds: float
    losses: list[float]
    peak_bytes: list[int]
    planned_bytes: list[int | None]


def measure(contender: str, work: Work, options: Options, *, fork: bool = False, **how: object) -> Measured:
    """Run a contender once; `how` is for `run_job`."""
    num_processes = CONTENDERS[contender].processes(options)
    if fork:  # what is imported here, none of the forks imports again
        CONTENDERS[contender].load()
    parts = run_job(_measure_process, (contender, work, options), num_processes, fork=fork, **how)  # type: ignore[arg-type]
    losses = next((part.losses for part in parts if part.losses), [])
    peaks, planned = (
        [size for part in parts for size in getattr(part, name)] for name in ("peak_bytes", "planned_bytes")
    )
    return Measured(max(part.seconds for part in parts), losses, peaks, planned)


def _measure_process(name: str, work: Work, options: Options) -> Measured:
    """One process's part."""
    rank = int(os.environ["RANK"])
    if work.device == "cuda":
        torch.cuda.set_device(rank)
    contender = CONTENDERS[name].load()(work, options, rank)
    losses = [contender.step() for _ in range(work.warmup_steps)]
    machine.reset_peak(work.device)
    losses.append(contender.step())  # it pays for the memory that was given back
    meet()
    start = time.perf_counter()
    losses += [contender.step() for _ in range(work.steps)]
    meet()
    seconds = (time.perf_counter() - start) / work.steps
    planned = contender.planned_bytes(rank) if work.device == "cuda" and hasattr(contender, "planned_bytes") else None
    return Measured(
        seconds, [loss for loss in losses if loss is not None], [machine.peak_bytes(work.device)], [planned]
    )
