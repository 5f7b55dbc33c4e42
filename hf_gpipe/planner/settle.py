"""What the planner decides for a `Pipeline` that is being made: the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.planner.costs import ModelCosts
from hf_gpipe.planner.measure import costs_of
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.resolve import resolve
from hf_gpipe.planner.settings import Request, Settled
from hf_gpipe.planner.this_machine import this_machine
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.topology import Topology


def settle(
    adapter: Adapter,
    request: Request,
    example: Mapping[str, torch.Tensor] | Workload | None,
    topology: Topology,
    *,
    peft: PeftAdapter | None = None,
    label_smoothing: float = 0.0,
) -> Settled:
    """Decide what a request leaves open. Every process calls it; the main process decides for its own device.

    Args:
        adapter: the model's.
        request: what is asked for.
        example: a mini-batch like those to come, or its shape; read in the main process.
        topology: the processes, and their devices.
        peft: PEFT layers that alone are trained.
        label_smoothing: of the loss.

    Raises:
        UserError: on every process: no example, or nothing that could be run.
    """
    return topology.from_main(
        lambda: resolve(_planner(adapter, request, example, topology, peft, label_smoothing), request)
    )


def _planner(
    adapter: Adapter,
    request: Request,
    example: Mapping[str, torch.Tensor] | Workload | None,
    topology: Topology,
    peft: PeftAdapter | None,
    label_smoothing: float,
) -> Planner:
    if example is None:
        raise UserError(
            "the planner needs the shape of a mini-batch to choose auto values or to cut the model by cost: give "
            "example=, a mini-batch as long as the longest to come"
        )
    mini_batch = example if isinstance(example, Workload) else Workload.of_batch(example)

    def costs(rows: int) -> ModelCosts:
        return costs_of(
            adapter,
            replace(mini_batch, rows=rows),
            peft=peft,
            label_smoothing=label_smoothing,
            as_on_gpu=topology.device.type == "cuda",
        )

    device = this_machine(topology.device, topology.num_processes)
    return Planner(costs, mini_batch.rows, device, request.memory_bytes)
