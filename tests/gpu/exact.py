"""Steps of a pipeline on GPUs beside the plain Hugging Face model on one of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_gpipe import Pipeline
from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD
from hf_gpipe.modes.host_graphs import copies as offload
from hf_gpipe.modes.visits.round_robin import ROUND_ROBIN
from hf_gpipe.schedule import training_schedules
from tests.emulated_cuda.models import config_of
from tests.gpu.checks import FAMILIES
from tests.oracle import Result, padded_batch, plain_model, run_plain

#: Largest difference of a gradient, as a share of the norm of all of them, and of the loss, as a share of it.
#: In bfloat16 4 units of its rounding: a stage adds gradients in another order, and may use another attention kernel.
BOUNDS = {"float64": 1e-10, "bfloat16": 2.0**-6}
NUM_MICRO_BATCHES = 4
RECOMPUTE = ("none", "block", "stage")
#: Ways to train whose code for CUDA no schedule above runs, with the families that they are checked on.
_DEALT = {"num_stages": 4, "schedule": "round_robin", "recompute": "stage", "offload_weights": "all"}
FEATURES: tuple[tuple[Sequence[str], dict[str, Any]], ...] = (
    (FAMILIES, {"num_stages": 3, "schedule": "breadth_first", "recompute": "stage", "offload_weights": "all"}),
    (("llama", "marian"), _DEALT),
    (FAMILIES, {"num_stages": 2, "schedule": "1f1b", "recompute": "host"}),
    (("llama",), {"num_stages": 2, "schedule": "1f1b", "recompute": "none", "sequence_chunks": 3}),
    (("llama",), {"num_stages": 2, "schedule": "gpipe", "recompute": "stage", "length_bucketing": True}),
)


def exact(job: dict[str, Any]) -> dict[str, Any]:
    """Every schedule with every mode of recomputation and every family; with `quick` each schedule once."""
    rank, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0 if job.get("shared") else rank)
    comparison = Comparison(job["dtype"])
    places = num_processes, job["num_devices"]
    for family, schedule, recompute in ways(job.get("families", FAMILIES), *places, quick=job["quick"]):
        num_stages = stages_of(schedule, num_processes, job["num_devices"])
        device: Any = [f"cuda:{index}" for index in range(min(job["num_devices"], num_stages))]
        device = "cuda:0" if job.get("shared") else "cuda" if num_processes > 1 else device
        comparison.add(family, device, num_stages=num_stages, schedule=schedule, recompute=recompute)
    return comparison.report()


def features(job: dict[str, Any]) -> dict[str, Any]:
    """Weights that visit the device, activations on the host, chunks of rows: in one process, on one GPU."""
    offload.SMALLEST_BYTES = 1  # what these models save is small
    comparison = Comparison(job["dtype"])
    for families, options in FEATURES:
        for family in families:
            comparison.add(family, "cuda:0", **options)
    return comparison.report()


def stages_of(schedule: str, num_processes: int, num_devices: int) -> int:
    """Stages for a schedule on so many processes, or in one with so many devices: one each where that is possible."""
    if schedule in ("zb_v", "v_half"):
        return 2 * num_processes
    num_stages = max(num_processes, num_devices, 2)
    return 2 * num_stages if schedule == "interleaved_1f1b" and num_processes > 1 else num_stages


def replicas(job: dict[str, Any]) -> dict[str, Any]:
    """Two replicas of each stage, one process each."""
    num_processes = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["RANK"]))
    comparison = Comparison(job["dtype"])
    for family in FAMILIES[:1] if job["quick"] else FAMILIES:
        for schedule in ("gpipe", "1f1b"):
            comparison.add(
                family, "cuda", num_stages=num_processes // 2, schedule=schedule, recompute="stage", replicas=2
            )
    return comparison.report()


def ways(
    families: Sequence[str], num_processes: int, num_devices: int, *, quick: bool
) -> Iterator[tuple[str, str, str]]:
    """Families, schedules and modes of recomputation: all of each with all others; with `quick` each schedule once.

    Schedules that deal stages are left out: their weights must visit the devices, and they recompute. In one process of
    several devices those that divide the head are left out, because they need a process for each device.
    """
    left_out = (ROUND_ROBIN, *(DIVIDED_HEAD if num_processes == 1 and num_devices > 1 else ()))
    for number, schedule in enumerate(name for name in training_schedules() if name not in left_out):
        if quick:
            # Not always the same mode with a family.
            yield families[number % len(families)], schedule, RECOMPUTE[(number + number // 3) % len(RECOMPUTE)]
            continue
        for family in families:
            for recompute in RECOMPUTE:
                yield family, schedule, recompute


class Comparison:
    """Compares pipelines with the plain model, and keeps the largest difference.

    Args:
        dtype: of weights and arithmetic, by name.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype, self.bound = dtype, BOUNDS[dtype]
        self.worst, self.num_steps = 0.0, 0
        self.problems: list[str] = []
        self._expected: dict[str, Result] = {}

    def add(self, family: str, device: Any, **values: Any) -> None:
        """Train one step of a pipeline, and compare its loss and all gradients. Every process must call it."""
        what = f"{family} {' '.join(f'{name}={value}' for name, value in values.items())}"
        if family not in self._expected:
            plain = self.model(family).to("cuda")
            batch = {name: tensor.to("cuda") for name, tensor in padded_batch(plain.config).items()}
            self._expected[family] = run_plain(plain, batch, NUM_MICRO_BATCHES)
        expected = self._expected[family]
        pipe = Pipeline(self.model(family), num_micro_batches=NUM_MICRO_BATCHES, device=device, **values)
        batch = padded_batch(pipe.adapter.config)
        loss = float(pipe.train_step(batch if pipe.world.rank == 0 else None))
        own = {name: model for model in pipe.models.values() for name in model.parameters}
        mine = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        # Of divided layers each process has parts.
        mine = {name: own[name].division.whole(name, part) if name in own else part for name, part in mine.items()}
        # Replicas of a stage have the same parameters, and each has the whole gradient.
        parts = pipe.world.gather_objects({name: gradient.cpu() for name, gradient in mine.items()})
        self.judge(what, [Result(loss, part) for part in parts], expected)

    def judge(self, what: str, parts: Sequence[Result], expected: Result) -> None:
        """Compare a step, of which each process has the gradients of its stages, with the plain model's."""
        self.num_steps += 1
        if {name for part in parts for name in part.gradients} != expected.gradients.keys():
            self.problems.append(f"{what}: gradients of other parameters")
            return
        norm = expected.norm
        errors = {"the loss": abs(parts[0].loss - expected.loss) / abs(expected.loss)}
        for name, gradient in (one for part in parts for one in part.gradients.items()):
            difference = gradient.cpu().double() - expected.gradients[name].cpu().double()
            error = float(difference.norm()) / norm
            errors[name] = max(error, errors.get(name, 0.0), key=lambda one: math.inf if math.isnan(one) else one)
        name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        self.worst = max(self.worst, errors[name])
        if not errors[name] <= self.bound:
            self.problems.append(f"{what}: {name} is off by {errors[name]:.1e}, more than {self.bound:.1e}")

    def model(self, family: str) -> Any:
        """The plain model; in bfloat16 with the attention that transformers chooses."""
        config = config_of(family)
        if family == "llama":
            config.num_hidden_layers = 6  # enough for two stages in each of four processes
        model = plain_model(config, dtype=getattr(torch, self.dtype))
        if self.dtype == "bfloat16" and model._supports_sdpa:
            model.set_attn_implementation("sdpa")
        return model

    def report(self) -> dict[str, Any]:
        figures = {"largest difference": self.worst, "bound": self.bound, "steps": self.num_steps}
        return {"figures": figures, "problems": self.problems}
