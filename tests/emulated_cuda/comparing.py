"""Compares steps on the emulated devices with the same steps on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, T5Config

from hf_gpipe import Pipeline
from tests.oracle import VOCABULARY, Batch, padded_batch, plain_model, tiny_config

#: Largest difference of a gradient or weight, as a share of the norm of all of them.
TOLERANCE = 1e-15


def config_of(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny configuration; of T5 too."""
    if family != "t5":
        return tiny_config(family, **overrides)
    dropout = overrides.pop("dropout", 0.0)
    return T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=overrides.pop("num_layers", 2),
        num_heads=2,
        dropout_rate=dropout,
        pad_token_id=0,
        decoder_start_token_id=0,
        tie_word_embeddings=overrides.pop("tied", True),
        **overrides,
    )


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


def outcome(
    config: PreTrainedConfig, device: str | Sequence[str], batch: Batch | None = None, **of_pipeline: Any
) -> Outcome:
    """Two steps, and an evaluation between them, of a pipeline that starts with the same weights each time."""
    pipe = Pipeline(plain_model(config), device=device, **of_pipeline)
    batch = batch or padded_batch(config)
    given = dict(batch) if pipe.topology.rank == 0 else None
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=1e-2)  # a process may own none
    numbers: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for step in range(2):
        numbers[f"loss {step}"] = float(pipe.train_step(given))
        numbers[f"norm {step}"] = float(pipe.clip_grad_norm_(0.1))
        gradients = gradients or gathered(pipe, {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None})
        optimizer.step()
        pipe.zero_grad()
        numbers[f"evaluation {step}"] = pipe.eval_step(given).loss
    return Outcome(numbers, gradients, gathered(pipe, dict(pipe.named_parameters())))


def gathered(pipe: Pipeline, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all processes, copied to the CPU. Replicas must have the same."""
    mine = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    everything: dict[str, torch.Tensor] = {}
    for part in pipe.topology.gather_objects(mine):
        for name, tensor in part.items():
            assert torch.equal(everything.setdefault(name, tensor), tensor), f"the replicas of {name} differ"
    return everything


def assert_equals_the_cpu_s(
    config: PreTrainedConfig, device: str | Sequence[str], tolerance: float = TOLERANCE, **of_pipeline: Any
) -> None:
    """Run two steps on the CPU and on the emulated devices, and compare all numbers."""
    expected = outcome(copy.deepcopy(config), "cpu", **of_pipeline)
    found = outcome(copy.deepcopy(config), device, **of_pipeline)
    assert_same(found, expected, tolerance, str(of_pipeline))


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
