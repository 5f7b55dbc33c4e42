"""Stages whose layers are divided among processes compute what the plain model computes: losses and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from tests.gloo import run_gloo
from tests.oracle import Result, assert_same, padded_batch, plain_model, run_plain, tiny_config

CASES: dict[str, dict[str, Any]] = {
    "gpipe": {"num_stages": 1, "schedule": "gpipe", "recompute": "stage"},
    "1f1b": {"num_stages": 2, "schedule": "1f1b", "recompute": "none"},
    "block": {"num_stages": 2, "schedule": "1f1b", "recompute": "block"},
    "zb_h1": {"num_stages": 2, "schedule": "zb_h1", "recompute": "stage"},
}


def whole_gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The gradients of all processes, whole, on each."""
    mine = {}
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            mine[name] = pipe.weights.whole(name, parameter.grad.clone())
    found: dict[str, torch.Tensor] = {}
    for part in pipe.world.gather_objects(mine):
        for name, gradient in part.items():
            assert torch.equal(found.setdefault(name, gradient), gradient), name
    return found


def steps(family: str, size: int, values: dict[str, Any], options: dict[str, Any]) -> tuple[Result, float]:
    """The loss and whole gradients of one step, and the norm."""
    config = tiny_config(family, **values)
    pipe = Pipeline(plain_model(config), num_micro_batches=3, tensor_parallel=size, **options)
    norms = []
    loss = pipe.train_step(padded_batch(config) if pipe.world.rank == 0 else None, update=lambda _, n: norms.append(n))
    return Result(float(loss), whole_gradients(pipe)), float(norms[0])


@pytest.mark.parametrize("family", ["llama", "marian"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_plain_model(family: str, case: str) -> None:
    options = CASES[case]
    expected = run_plain(plain_model(config := tiny_config(family)), padded_batch(config), 3)
    for found, norm in run_gloo(steps, 2 * options["num_stages"], family, 2, {}, options):
        assert_same(found, expected)
        assert norm == pytest.approx(expected.norm, rel=1e-10)
