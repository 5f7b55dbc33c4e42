"""Models made of numbers: costs of layers that are easy to add up by hand."""

from __future__ import annotations

from typing import Any

from hf_gpipe.planner.costs.model_costs import (
    GraphCost,
    LayerCost,
    ModelCosts,
    Operations,
    Parameters,
    Seconds,
    SharedParameter,
)
from hf_gpipe.planner.machines.devices import LINKS, Device
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.settings.pipeline import DecidedConfig

DEVICE = Device("toy", None, {"float32": 1.0}, 1e30, LINKS["nvlink4"], reserved_share=0.05, reserved_working_share=0.05)
"""It does one operation a second."""

MIB = 1 << 20


def layer(
    name: str,
    *,
    kind: str = "block",
    weights: int = 10 * MIB,
    flops: int = 1,
    boundary: int = MIB,
    saved: int = 5 * MIB,
    block_saved: int = MIB,
    shared: tuple[SharedParameter, ...] = (),
    seconds: float | None = None,
) -> LayerCost:
    """A layer whose backward is twice its forward; `weights`, `boundary` and `saved` in bytes."""
    return LayerCost(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # a text here, one of its names
        stack="decoder",
        parameters=Parameters(weights // 4, weights, weights // 4, weights),
        shared=shared,
        buffer_bytes=0,
        forward=Operations(flops),
        backward=Operations(2 * flops),
        input_bytes=boundary,
        gradient_input_bytes=boundary,
        forward_working_bytes=0,
        forward_only_working_bytes=0,
        plain=GraphCost(saved, 0, 0, 0),
        block=GraphCost(block_saved if kind == "block" else saved, 0, 0, saved),
        seconds=None if seconds is None else Seconds(seconds, seconds, 2 * seconds),
    )


def model(*layers: LayerCost) -> ModelCosts:
    """Of one row of four tokens; the ids take no memory."""
    return ModelCosts(layers, Workload(1, 4, 4), 0, "float32", "float32")


def blocks(count: int, **options: int) -> ModelCosts:
    """Equal blocks."""
    return model(*(layer(f"h.{index}", **options) for index in range(count)))  # type: ignore[arg-type]  # numbers only


def planner(costs: ModelCosts, rows: int = 4, memory_bytes: int | None = None, **inputs: Any) -> Planner:
    """Of a model whose micro-batches cost the same, however many rows they have; SGD where not changed."""
    made = Planner(
        lambda *_: [costs], PlanInputs(Workload(rows, 1, 1), **{"optim": "sgd", **inputs}), DEVICE, memory_bytes
    )
    made.possible = frozenset({"visits", "shared_stages"})
    return made


def settings(partition: tuple[int, ...], num_micro_batches: int = 4, **changes: object) -> DecidedConfig:
    """gpipe without recomputation and a process per stage, where not changed."""
    values: dict[str, object] = {
        "num_stages": len(partition),
        "num_micro_batches": num_micro_batches,
        "schedule": "gpipe",
        "recompute": "none",
        "partition": partition,
        "num_processes": len(partition),
    }
    return DecidedConfig(**(values | changes))  # type: ignore[arg-type]  # the fields by name
