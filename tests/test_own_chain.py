"""A user's own chain of modules trains in a pipeline, with the numbers of the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_gpipe import LogitsLoss, Pipeline
from hf_gpipe.runtime.cutting import split_rows
from tests.oracle import Result, assert_same, run_pipeline


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x).relu())


def squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return F.mse_loss(outputs.logits, labels, reduction="sum") / num_items_in_batch


IMAGES = nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(),
    nn.Linear(36, 16), Residual(16), nn.Tanh(), Residual(16),
)  # fmt: skip
CASES = {"classes": (5, None), "numbers": (2, LogitsLoss(squares))}


@pytest.mark.parametrize("recompute", ["none", "stage", "block"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_ones_own(case: str, num_stages: int, num_micro_batches: int, recompute: str) -> None:
    outputs, loss = CASES[case]
    torch.manual_seed(0)
    model = nn.Sequential(*copy.deepcopy(IMAGES), nn.Linear(16, outputs)).double()
    batch = {"pixels": torch.randn(7, 3, 9, 9, dtype=torch.float64), "labels": torch.randint(0, outputs, (7,))}
    if loss is not None:
        batch["labels"] = torch.randn(7, outputs, dtype=torch.float64)
    plain, value = copy.deepcopy(model), 0.0
    for rows in split_rows(batch, num_micro_batches):
        result = plain(rows["pixels"])
        part = F.cross_entropy(result, rows["labels"], reduction="sum") if loss is None else None
        part = F.mse_loss(result, rows["labels"], reduction="sum") if part is None else part
        (part / 7).backward()
        value += part.item() / 7
    expected = Result(value, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    pipe = Pipeline(model, num_stages, num_micro_batches, recompute=recompute, loss=loss)
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(value, rel=1e-10)
