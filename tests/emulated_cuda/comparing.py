"""Compares steps on the emulated devices with the same steps on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_gpipe import Pipeline
from hf_gpipe.planner.costs import measure
from tests.emulated_cuda.models import config_of
from tests.emulated_cuda.processes import run_emulated
from tests.oracle import padded_batch, plain_model

#: Largest difference of a gradient or weight, as a share of the norm of all of them.
TOLERANCE = 1e-15


@dataclass
class Outcome:
    """What two steps with clipping and AdamW gave, on the CPU; of all processes.

    Attributes:
        numbers: losses, norms and the loss of an evaluation.
        gradients: of the first step, by name.
        weights: after the last step.
    """

    numbers: dict[str, float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def outcome(config: PreTrainedConfig, device: str | Sequence[str], **of_pipeline: Any) -> Outcome:
    """Two steps and an evaluation of a pipeline that starts with the same weights each time."""
    pipe = Pipeline(plain_model(config), device=device, **of_pipeline)
    batch = padded_batch(config) if pipe.world.rank == 0 else None
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=1e-2)  # a process may own none
    if of_pipeline.get("zero"):
        pipe.shard_optimizer(optimizer)
    numbers: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for step in range(2):
        numbers[f"loss {step}"] = float(pipe.train_step(batch))
        numbers[f"norm {step}"] = float(pipe.clip_grad_norm_(0.1))
        gradients = gradients or gathered(pipe, {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None})
        optimizer.step()
        pipe.zero_grad()
    numbers["evaluation"] = pipe.eval_step(batch).loss
    return Outcome(numbers, gradients, gathered(pipe, dict(pipe.named_parameters())))


def measure_little() -> None:
    """Let the planner measure small products and copies: those that are quick on a GPU take long here."""
    measure._PRODUCT_SIZES["cuda"] = (64,)
    measure._COPIED_BYTES = 1 << 20


Ways = Sequence[Mapping[str, Any]]
"""Arguments of several pipelines, such as `{"schedule": "1f1b"}`."""


def compare(
    num_processes: int, family: str, device: str | Sequence[str], ways: Ways, *, blocks: bool = False, **of_config: Any
) -> None:
    """Run steps on the emulated devices in each of several ways, and compare all numbers with the CPU's.

    Args:
        num_processes: in which they run.
        family: of the model.
        device: of the pipelines.
        ways: their arguments.
        blocks: whether each message blocks its process until the other one has met it, as with
            CUDA_LAUNCH_BLOCKING=1, and for a moment whenever a kernel is loaded or memory is freed.
        of_config: values of the model's configuration.
    """
    numbers = {way["num_micro_batches"] for way in ways}
    expected = {number: on_the_cpu(family, number, **of_config) for number in numbers}
    config = config_of(family, **of_config)
    environment = {"CUDA_LAUNCH_BLOCKING": "1"} if blocks else {}
    run_emulated(check, num_processes, config, device, ways, expected, environment)


@cache
def on_the_cpu(family: str, num_micro_batches: int, **of_config: Any) -> Outcome:
    """The steps on one stage on the CPU, in this process, which has no emulated device. Other ways give the same."""
    return outcome(config_of(family, **of_config), "cpu", num_stages=1, num_micro_batches=num_micro_batches)


def check(
    config: PreTrainedConfig,
    device: str | Sequence[str],
    ways: Ways,
    expected: Mapping[int, Outcome],
    environment: Mapping[str, str],
) -> None:
    """Run each way in this process and compare it; `expected` by the number of micro-batches."""
    os.environ |= environment
    for way in ways:
        assert_same(outcome(config, device, **way), expected[way["num_micro_batches"]], what=str(way))


def gathered(pipe: Pipeline, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all processes, copied to the CPU. Replicas must have the same."""
    model_of = {name: pipe.models[pipe.ties.owner_stage[name]] for name in tensors}
    mine = {
        name: model_of[name].division.whole(name, tensor.detach()).cpu().clone() for name, tensor in tensors.items()
    }
    everything: dict[str, torch.Tensor] = {}
    for part in pipe.world.gather_objects(mine):
        for name, tensor in part.items():
            assert torch.equal(everything.setdefault(name, tensor), tensor), f"the replicas of {name} differ"
    return everything


def assert_same(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE, what: str = "") -> None:
    """All numbers, gradients and weights, within `tolerance`."""
    for name, number in expected.numbers.items():
        assert abs(found.numbers[name] - number) <= tolerance * max(1.0, abs(number)), (
            f"{what}: {name} is {found.numbers[name]!r} and on the CPU {number!r}"
        )
    assert_near(found.gradients, expected.gradients, tolerance, f"{what}: gradient")
    assert_near(found.weights, expected.weights, tolerance, f"{what}: weight")


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str = ""
) -> None:
    """Each tensor within `tolerance` of the norm of all of them."""
    assert found.keys() == expected.keys()
    norm = float(torch.stack([tensor.double().norm() for tensor in expected.values()]).norm())
    assert norm > 0
    for name, tensor in expected.items():
        error = float((found[name] - tensor).double().norm()) / norm
        assert error <= tolerance, f"{what} {name} is off by {error:.1e} of the norm"
