"""AmoebaNet-D of the examples: GPipe's numbers of parameters, and the plain network's loss and gradients in stages."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from examples.amoebanet import PAPER, amoebanet_d
from hf_gpipe import Pipeline
from hf_gpipe.adapters.chain import Chain
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import NO_OPERATIONS
from hf_gpipe.runtime.cutting import split_rows
from scripts import amoebanet_tables
from tests.oracle import Result, assert_same, run_pipeline


def test_parameters_are_those_of_the_paper() -> None:
    """Of 1.8B the paper prints two digits, and 1.845B has the same two."""
    for sizes, printed in PAPER.items():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in amoebanet_d(*sizes).parameters())
        assert abs(count / printed - 1) < 0.02 or f"{count / 1e9:.1f}" == f"{printed / 1e9:.1f}" == "1.8"


def test_stages_have_the_plain_network_s_gradients() -> None:
    torch.manual_seed(0)
    model = amoebanet_d(3, 16, num_classes=5).double()
    batch = {"pixels": torch.randn(4, 3, 64, 64, dtype=torch.float64), "labels": torch.tensor([0, 3, 2, 4])}
    plain, value = copy.deepcopy(model), 0.0
    for rows in split_rows(batch, 2):
        loss = F.cross_entropy(plain(rows["pixels"]), rows["labels"], reduction="sum") / 4
        loss.backward()
        value += loss.item()
    expected = Result(value, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    for num_stages, recompute in ((3, "stage"), (4, "block")):
        pipe = Pipeline(copy.deepcopy(model), num_stages, 2, "1f1b", recompute=recompute)
        assert_same(run_pipeline(pipe, batch), expected)


def test_costs_of_more_cells_are_those_of_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amoebanet_tables, "SIZE", 64)
    for cached in (amoebanet_tables.tracer, amoebanet_tables.costs):
        cached.cache_clear()
    found = amoebanet_tables.costs(12, 8, 2)
    with torch.device("meta"):
        network = amoebanet_d(12, 8)
    images = amoebanet_tables.images(2)
    expected = LayerTracer(Chain(network, images.shapes), as_on_gpu=True).costs(images)
    # A stage also calls a stub for each layer before it.
    layers, others = (
        [replace(one, name="", outside=NO_OPERATIONS) for one in each.layers] for each in (found, expected)
    )
    assert layers == others

    # The cells of Table 2: the network's time is the same, and the partition by time has the shortest steps.
    def step(partition: str) -> float:
        cell = amoebanet_tables.emulated(found.layers, 4, 8, partition)
        assert sum(cell.costs.forward_seconds) == pytest.approx(amoebanet_tables.FORWARD_SECONDS)
        return cell.predicted_seconds

    assert step("time") < min(step("layers"), step("parameters"))
    for cached in (amoebanet_tables.tracer, amoebanet_tables.costs):
        cached.cache_clear()
