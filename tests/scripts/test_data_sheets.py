"""Seconds by a data sheet: the bytes that operations move, and the steps that an H100 took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from bench.work import Work
from torch import Tensor
from torch.nn import functional as F

from hf_gpipe.planner.costs.tracker import Tracker
from hf_gpipe.planner.machines.devices import DEVICES, LINKS
from hf_gpipe.planner.of_model import planner_of
from tests.gpu.planned import cases

#: Seconds of a step on an H100 80GB HBM3 with torch 2.11 and transformers 5.17, for the cases of tests/gpu/planned.py
#: with two micro-batches; the median of three steps, each after the GPU was idle.
MEASURED = {
    "graphs stay": 0.248,
    "blocks recompute": 0.2949,
    "two stages recompute": 0.2805,
    "activations on the host": 0.2399,
    "autocast": 0.3589,
    "packed": 0.2191,
    "LoRA": 0.3245,
    "QLoRA": 0.4354,
    "LoRA, weights visit": 0.4499,
}
WORK = Work(8, 2560, 6912, 32000, rows=8, tokens=2048, micro_batches=2, dtype="bfloat16")


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_takes_what_an_h100_took(name: str) -> None:
    if "LoRA" in name:
        pytest.importorskip("peft")
    if name == "QLoRA":
        pytest.importorskip("bitsandbytes")
    h100 = DEVICES["h100"]
    device = replace(h100, host=replace(h100.host, link=LINKS["pcie5"]))
    [case] = (replace(case, num_micro_batches=2, device="cpu") for case in cases(WORK) if case.name == name)
    planner = planner_of(case.adapter(), case.inputs, device, case.settings, as_on_gpu=True)
    assert planner.plan(case.settings).step_seconds == pytest.approx(MEASURED[name], rel=0.2)


def _filled(x: Tensor, wide: Tensor) -> None:
    x.fill_(1.0).copy_(wide)


def _attention(x: Tensor, mask: Tensor) -> Tensor:
    states = x.view(2, 4, 128, 32)
    return F.scaled_dot_product_attention(states, states, states, attn_mask=mask.view(2, 1, 128, 128))


#: What runs on x of 2 x 128 x 128 numbers in float32 and another such tensor -> the numbers that it reads and writes.
SIZE = 2 * 128 * 128
MOVED: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "two inputs": (lambda x, y: x + y, 3 * SIZE),
    "one input twice": (lambda x, _: x * x, 2 * SIZE),
    "two parts of one": (lambda x, _: x[0] + x[1], 3 * SIZE // 2),
    "broadcast": (lambda x, y: x + y[:, :, :1].expand(2, 128, 128), 2 * SIZE + 2 * 128),
    "in place": (lambda x, y: x.add_(y), 3 * SIZE),
    "written over": (_filled, SIZE + 2 * SIZE),
    "views": (lambda x, _: x.view(256, 128).t()[:4].detach(), 0),
    "no kernel": (lambda x, _: torch.empty_like(x), 0),
    "a sum": (lambda x, _: x.sum(-1), SIZE + 2 * 128),
    "another type": (lambda x, _: x.to(torch.float64), 3 * SIZE),
    "rows of a table": (lambda x, _: F.embedding(torch.tensor([3, 5]), x[0]), 2 * (2 * 2 + 2 * 128)),
    "a product": (lambda x, y: x @ y, 0),
    "a narrow product": (lambda x, y: x[0] @ y[0, :, :8], 128 * (128 + 8 + 8)),
    "attention's mask, by head": (_attention, 4 * SIZE),
}


@pytest.mark.parametrize(("run", "expected"), MOVED.values(), ids=MOVED)
def test_what_an_operation_moves(run: Callable[[Tensor, Tensor], Any], expected: int) -> None:
    x, y = torch.ones(2, 128, 128), torch.ones(2, 128, 128)
    with torch.no_grad(), Tracker() as tracker, tracker.phase() as phase:
        run(x, y)
    assert phase.moved == 4 * expected


@pytest.mark.parametrize(("as_on_gpu", "expected"), [(True, 3 * SIZE), (False, 6 * SIZE)])
def test_a_gpu_draws_dropout_as_it_multiplies(as_on_gpu: bool, expected: int) -> None:
    x = torch.ones(2, 128, 128)
    with Tracker(as_on_gpu=as_on_gpu) as tracker, tracker.phase() as phase:
        F.dropout(x, 0.1)
    assert phase.moved == 4 * expected
