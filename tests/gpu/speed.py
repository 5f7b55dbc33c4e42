"""Speed and memory on GPUs, beside a plain Hugging Face loop and torch.distributed.pipelining, of identical work."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from bench.contenders import Options
from bench.measure import Measured, measure
from bench.processes import JobFailedError
from bench.report import Spread, paired
from bench.settings import Case
from bench.work import Work

from tests.emulated_cuda.comparing import measure_little
from tests.gpu.checks import VARIABLES, Result
from tests.gpu.peaks import peak_flops

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
class Comparison:
    """Cases that do the same work on the same number of GPUs; the first is what the others are compared with."""

    name: str
    work: Work
    num_gpus: int
    cases: tuple[Case, ...]
    peak_flops: float | None
    emulated: bool
    kind: str = "speed"

    def measure(self, reps: int, limit_seconds: float) -> list[Result]:
        """A result for each case: medians of repetitions that alternate, every other one in reverse."""
        runs: dict[str, list[Measured]] = {case.name: [] for case in self.cases}
        errors: dict[str, JobFailedError] = {}
        how = {"fork": self.emulated, "timeout_seconds": limit_seconds, "variables": VARIABLES}
        if self.emulated:
            measure_little()
        start = time.monotonic()
        for rep in range(reps):
            for case in self.cases[:: -1 if rep % 2 else 1]:
                if case.name not in errors:
                    try:
                        runs[case.name].append(measure(case.contender, self.work, case.options, **how))
                    except JobFailedError as error:
                        errors[case.name] = error
        seconds = (time.monotonic() - start) / len(self.cases)
        found = []
        for case in self.cases:
            if case.name in errors:
                found.append(Result.of_error("speed", f"{self.name}: {case.name}", seconds, errors[case.name]))
            else:
                found.append(self._judge(case, runs, seconds))
        return found

    def _judge(self, case: Case, runs: dict[str, list[Measured]], seconds: float) -> Result:
        own = runs[case.name]
        losses = next(several[0].losses for several in runs.values() if several)
        pairs = [pair for run in own for pair in zip(run.losses, losses, strict=True)]
        differs = any(abs(a - b) > LOSS_TOLERANCE * abs(b) for a, b in pairs)
        message = f"its losses {own[0].losses} are not those of the first case, {losses}" if differs else ""
        figures: dict[str, Any] = {"last loss": own[0].losses[-1]}
        if self.emulated:
            message = message or "no figures of speed and memory: the devices are emulated"
        else:
            figures |= self._figures(case, runs)
        result = "failed" if differs else "passed"
        return Result("speed", f"{self.name}: {case.name}", result, False, seconds, figures, message)

    def _figures(self, case: Case, runs: dict[str, list[Measured]]) -> dict[str, Any]:
        own, seconds = runs[case.name], Spread.of(run.seconds for run in runs[case.name])
        tokens = self.work.rows * self.work.tokens / seconds.median
        figures: dict[str, Any] = {"tokens per second": tokens, "seconds a step": seconds.median}
        figures["range"] = [seconds.low, seconds.high]
        if self.peak_flops:
            figures["MFU"] = tokens * flops_per_token(self.work) / (self.peak_flops * self.num_gpus)
        figures["peak GB"] = Spread.of(max(run.peak_bytes) for run in own).median / 1e9
        if planned := [size for size in own[0].planned_bytes if size]:
            figures["planned GB"] = planned[own[0].peak_bytes.index(max(own[0].peak_bytes))] / 1e9
        # Each of hf_gpipe's cases follows the one that it is compared with.
        before = runs[self.cases[self.cases.index(case) - 1].name]
        if case.contender == "ours" and len(before) == len(own):
            pairs = ([run.seconds for run in several] for several in (before, own))
            figures["speed-up over the one before"] = paired(*pairs).median
        return figures


def fitting(environment: dict[str, Any], num_gpus: int, *, emulated: bool) -> list[Work]:
    """Sizes of work that fit the GPU with the least free memory, the largest first."""
    if emulated:
        return [_TINY]
    free = min(gpu["free_bytes"] for gpu in environment["gpus"][:num_gpus]) / 2**30
    return [work for least, work in _SIZES if free >= least]


def comparisons(
    environment: dict[str, Any], num_gpus: int, *, quick: bool, emulated: bool, with_others: bool = False
) -> list[Comparison]:
    """Of work that fits the GPUs; nothing where none does. `with_others` adds compiled blocks and kernels of Liger."""
    gpus = environment["gpus"][:num_gpus]
    sizes = fitting(environment, num_gpus, emulated=emulated)
    if not sizes:
        return []
    work = sizes[1 if quick and len(sizes) > 1 else 0]
    peak = peak_flops(gpus[0]["name"]) if len({gpu["name"] for gpu in gpus}) == 1 else None
    one: tuple[Case, ...] = (
        Case("plain loop, checkpointing", "single", Options("on")),
        Case("hf_gpipe, block", "ours", Options("block", "1f1b", blocks=(work.layers,))),
    )
    if with_others and not emulated:
        own = Options("block", "1f1b", blocks=(work.layers,))
        names = {"hf_gpipe, block, compiled": "torch_compile", "hf_gpipe, block, Liger": "use_liger_kernel"}
        one += tuple(Case(name, "ours", replace(own, others=((key, True),))) for name, key in names.items())
    made = [Comparison("1 GPU", work, 1, one, peak, emulated)]
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
        made.append(Comparison(f"{n} GPUs", work, n, tuple(cases), peak, emulated))
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
