"""scripts/uneven_replication.py, on layers that are easy to add up."""

from __future__ import annotations

from uneven_replication import replications, step

from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.machines.devices import LINKS
from tests.planner.models import DEVICE, layer, model


def test_a_dear_head_gets_both_workers() -> None:
    costs = model(*(layer(f"h.{i}") for i in range(4)), layer("head", kind="head", flops=8))
    steps = sorted(step(StageCosts(costs, DEVICE), replicas, 16, LINKS["nvlink4"]) for replicas in replications(3))
    assert len(steps) == 4
    assert (steps[0].replicas, steps[0].counts) == ((1, 2), (4, 1))
    assert steps[0] < next(one for one in steps if one.replicas == (1, 1, 1))
