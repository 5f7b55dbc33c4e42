"""Speed and memory on GPUs, beside a plain Hugging Face loop and torch.distributed.pipelining, of identical work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from bench.contenders import CONTENDERS, Options
from bench.processes import JobFailedError
from bench.work import Work

from gpu_check.checks import Check
from gpu_check.peaks import peak_flops
from gpu_check.running import Result, call, cause
from hf_gpipe.planner import measure as planner_measure

#: The largest difference of a case's losses from those of the first case, as a share of them: rounding of bfloat16.
LOSS_TOLERANCE = 2e-2
#: (least free memory of a GPU in GiB, work in bfloat16); about 1.4, 0.6 and 0.13 billion parameters.
_SIZES = (
    (40, Work(24, 2048, 5632, 32000, rows=16, tokens=1024, dtype="bfloat16", device="cuda", warmup_steps=2)),
    (16, Work(18, 1536, 4096, 32000, rows=16, tokens=1024, dtype="bfloat16", device="cuda", warmup_steps=2)),
    (4, Work(12, 768, 2048, 32000, rows=16, tokens=512, dtype="bfloat16", device="cuda", warmup_steps=2)),
)
_TINY = Work(8, 64, 64, 128, rows=8, tokens=16, device="cuda", steps=1)


@dataclass(frozen=True)
class Case:
    """A contender, under the name that the table shows."""

    name: str
    contender: str
    options: Options


@dataclass(frozen=True)
class Comparison:
    """Cases that do the same work on the same number of GPUs; the first is what the others are compared with."""

    name: str
    work: Work
    num_gpus: int
    cases: tuple[Case, ...]
    peak_flops: float | None


def comparisons(environment: dict[str, Any], num_gpus: int, *, quick: bool, emulated: bool) -> list[Comparison]:
    """What fits the GPU with the least free memory; nothing where that is below 4 GiB."""
    gpus = environment["gpus"][:num_gpus]
    free = min(gpu["free_bytes"] for gpu in gpus) / 2**30
    sizes = [work for least, work in _SIZES if free >= least]
    if not sizes:
        return []
    work = _TINY if emulated else sizes[1 if quick and len(sizes) > 1 else 0]
    peak = peak_flops(gpus[0]["name"]) if len({gpu["name"] for gpu in gpus}) == 1 else None
    one = (
        Case("plain loop, checkpointing", "single", Options("on")),
        Case("hf_gpipe, block", "ours", Options("block", "1f1b", blocks=(work.layers,))),
    )
    made = [Comparison("1 GPU", work, 1, one, peak)]
    for n in (n for n in (2, 4) if n <= num_gpus):
        blocks = cut(work, n)
        cases = []
        for theirs, ours in (("none", "none"), ("on", "stage")):
            for schedule, name in (("Schedule1F1B", "1f1b"), ("ScheduleGPipe", "gpipe")):
                recomputed = "" if ours == "none" else ", recomputed"
                cases.append(Case(f"torch {schedule}{recomputed}", "torch", Options(theirs, schedule, blocks=blocks)))
                cases.append(Case(f"hf_gpipe {name}{recomputed}", "ours", Options(ours, name, blocks=blocks)))
        if quick:
            cases = cases[:4]
        if emulated:  # torch's schedules let go of tensors that the stand-in for NCCL has yet to send
            cases = [case for case in cases if case.contender == "ours"]
        made.append(Comparison(f"{n} GPUs", work, n, tuple(cases), peak))
    return made


def cut(work: Work, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: the last one has fewer, for the head takes the time of some."""
    block = 4 * work.hidden**2 + 3 * work.hidden * work.intermediate
    head = work.hidden * work.vocabulary / block
    last = max(1, round((work.layers + head) / num_stages - head))
    size, more = divmod(work.layers - last, num_stages - 1)
    return (*(size + (number < more) for number in range(num_stages - 1)), last)


def flops_per_token(work: Work) -> float:
    """Of forward and backward: 6 N with N the parameters without the input embedding, and 12 L D T for attention.

    As in PaLM (arXiv 2204.02311, appendix B); what is recomputed does not count, nor that attention is causal.
    """
    block = 4 * work.hidden**2 + 3 * work.hidden * work.intermediate
    parameters = work.layers * block + work.hidden * work.vocabulary
    return 6.0 * parameters + 12.0 * work.layers * work.hidden * work.tokens


def measure(comparison: Comparison, reps: int, limit_seconds: float, *, emulated: bool) -> Iterator[Result]:
    """A result for each case: medians of repetitions that alternate, every other one in reverse."""
    if emulated:  # the processes are forks of this one: what is imported here, none of them imports again
        for case in comparison.cases:
            CONTENDERS[case.contender].load()
    runs: dict[str, list[dict[str, Any]]] = {case.name: [] for case in comparison.cases}
    errors: dict[str, JobFailedError] = {}
    start = time.monotonic()
    for rep in range(reps):
        for case in comparison.cases[:: -1 if rep % 2 else 1]:
            if case.name in errors:
                continue
            job = {"contender": case.contender, "work": asdict(comparison.work), "options": asdict(case.options)}
            job["emulated"] = emulated
            check = Check("speed", case.name, "speed:steps", job, comparison.num_gpus, limit_seconds)
            try:
                runs[case.name].append(_together(call(check, emulated=emulated)))
            except JobFailedError as error:
                errors[case.name] = error
    seconds = (time.monotonic() - start) / len(comparison.cases)
    first = next((several[0]["losses"] for several in runs.values() if several), [])
    for case in comparison.cases:
        yield _judge(comparison, case, runs, errors.get(case.name), first, seconds, emulated=emulated)


def steps(job: dict[str, Any]) -> dict[str, Any]:
    """One process of a case."""
    if job["emulated"]:  # the planner's products of large matrices, quick on a GPU, would take most of the time
        planner_measure._PRODUCT_SIZES["cuda"] = (64,)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    work = Work(**job["work"])
    values = job["options"]
    options = Options(**{**values, "blocks": tuple(values["blocks"])})
    contender: Any = CONTENDERS[job["contender"]].load()(work, options, rank)
    losses = [contender.step() for _ in range(work.warmup_steps)]
    torch.cuda.reset_peak_memory_stats()
    _meet()
    start = time.perf_counter()
    losses += [contender.step() for _ in range(work.steps)]
    _meet()
    seconds = (time.perf_counter() - start) / work.steps
    planned = None
    if job["contender"] == "ours":
        planned = contender.pipe.plan(contender.batch).processes[rank].memory.total
    peak = torch.cuda.max_memory_allocated()
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak, "planned_bytes": planned}


def _meet() -> None:
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))  # on the CPU


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The processes of a run as one: the slowest, and the fullest."""
    fullest = max(parts, key=lambda part: part["peak_bytes"])
    return {
        "seconds": max(part["seconds"] for part in parts),
        "losses": next(part["losses"] for part in parts if part["losses"][0] is not None),
        "peak_bytes": fullest["peak_bytes"],
        "planned_bytes": fullest["planned_bytes"],
    }


def _judge(
    comparison: Comparison,
    case: Case,
    runs: dict[str, list[dict[str, Any]]],
    error: JobFailedError | None,
    losses: list[float],
    seconds: float,
    *,
    emulated: bool,
) -> Result:
    name, own = f"{comparison.name}: {case.name}", runs[case.name]
    if error is not None:
        hangs = "took too long" in str(error)
        return Result("speed", name, "failed", hangs, seconds, {}, cause(str(error)))
    differs = any(
        abs(a - b) > LOSS_TOLERANCE * abs(b) for run in own for a, b in zip(run["losses"], losses, strict=True)
    )
    message = f"its losses {own[0]['losses']} are not those of the first case, {losses}" if differs else ""
    figures: dict[str, Any] = {"last loss": own[0]["losses"][-1]}
    if emulated:
        message = message or "no figures of speed and memory: the devices are emulated"
    else:
        figures |= _figures(comparison, case, runs)
    return Result("speed", name, "failed" if differs else "passed", False, seconds, figures, message)


def _figures(comparison: Comparison, case: Case, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    own, work = runs[case.name], comparison.work
    medians = statistics.median(run["seconds"] for run in own)
    tokens = work.rows * work.tokens / medians
    figures: dict[str, Any] = {"tokens per second": tokens, "seconds a step": medians}
    figures["range"] = [min(run["seconds"] for run in own), max(run["seconds"] for run in own)]
    if comparison.peak_flops:
        figures["MFU"] = tokens * flops_per_token(work) / (comparison.peak_flops * comparison.num_gpus)
    figures["peak GB"] = statistics.median(run["peak_bytes"] for run in own) / 1e9
    if own[0]["planned_bytes"]:
        figures["planned GB"] = own[0]["planned_bytes"] / 1e9
    # Each of hf_gpipe's cases follows the one that it is compared with.
    before = comparison.cases[comparison.cases.index(case) - 1]
    if case.contender == "ours" and len(runs[before.name]) == len(own):
        pairs = zip(runs[before.name], own, strict=True)
        figures["speed-up over the one before"] = statistics.median(b["seconds"] / a["seconds"] for b, a in pairs)
    return figures
