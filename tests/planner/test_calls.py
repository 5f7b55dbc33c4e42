"""The time of operations that compute next to nothing: micro-batches that are too small are not chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_gpipe.planner.costs.model_costs import ModelCosts, Operations, estimated_seconds
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from tests.planner.models import DEVICE, layer, model, settings


@pytest.mark.parametrize(("has_host", "forward", "backward"), [(True, 5.0, 8.0), (False, 8.0, 11.0)])
def test_operations_take_time_however_small(has_host: bool, forward: float, backward: float) -> None:
    """A GPU computes and then moves bytes, while its host calls the next operation; a CPU does one after the other."""
    one = replace(layer("h.0"), forward=Operations(1, 4, 6), backward=Operations(2, 1, 16))
    device = replace(DEVICE, bytes_per_second=2.0, memory_share=0.5, call_seconds=0.5, has_host=has_host)
    seconds = estimated_seconds(one, "float32", device)
    assert (seconds.forward, seconds.backward) == (forward, backward)


def test_many_tiny_micro_batches_are_chosen_only_where_operations_cost_nothing() -> None:
    rows = 8

    def costs_of(count: int, _: int) -> list[ModelCosts]:
        one = [
            replace(
                layer(f"h.{i}", boundary=0),
                forward=Operations(count, calls=1),
                backward=Operations(2 * count, calls=2),
            )
            for i in range(4)
        ]
        return [model(*one)]

    chosen = {}
    for call_seconds in (0.0, 4.0):
        device = replace(DEVICE, call_seconds=call_seconds, has_host=False)
        planner = Planner(costs_of, PlanInputs(Workload(rows, 1, 1), "sgd"), device)
        config = settings((2, 2)).reopened(num_micro_batches="auto")
        chosen[call_seconds] = best_plan(planner, config).settings.num_micro_batches
    assert chosen[0.0] == rows
    assert chosen[4.0] < rows
