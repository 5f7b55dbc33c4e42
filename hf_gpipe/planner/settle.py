"""What the planner decides for a `Pipeline` that is being made: the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.planner.costs import ModelCosts
from hf_gpipe.planner.fix import smallest_fix
from hf_gpipe.planner.measure import costs_of
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.resolve import best_plan, resolve
from hf_gpipe.planner.settings import Request, Settled
from hf_gpipe.planner.this_machine import this_machine
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.topology import Topology


@dataclass(frozen=True)
class Expectation:
    """What the planner of a `Pipeline` reckons with.

    Attributes:
        example: a mini-batch like those to come, or its shape; read in the main process. None: nothing is known.
        adapter: the model's.
        peft: PEFT layers that alone are trained.
        label_smoothing: of the loss.
        topology: the processes, and their devices.
    """

    example: Mapping[str, torch.Tensor] | Workload | None
    adapter: Adapter
    peft: PeftAdapter | None
    label_smoothing: float
    topology: Topology

    def planner(self, memory_bytes: int | None) -> Planner:
        """For the device of this process. Raises UserError without an example."""
        if self.example is None:
            raise UserError(
                "the planner needs the shape of a mini-batch to choose auto values or to cut the model by cost: give "
                "example=, a mini-batch as long as the longest to come"
            )
        mini_batch = self.example if isinstance(self.example, Workload) else Workload.of_batch(self.example)

        def costs(rows: int) -> ModelCosts:
            return costs_of(
                self.adapter,
                replace(mini_batch, rows=rows),
                peft=self.peft,
                label_smoothing=self.label_smoothing,
                as_on_gpu=self.topology.device.type == "cuda",
            )

        device = this_machine(self.topology.device, self.topology.num_processes)
        return Planner(costs, mini_batch.rows, device, memory_bytes)


def settle(expectation: Expectation, request: Request) -> Settled:
    """Decide what a request leaves open. Every process calls it; the main process decides for its own device.

    Raises:
        UserError: on every process: no example, or nothing that could be run.
    """
    return expectation.topology.from_main(lambda: resolve(expectation.planner(request.memory_bytes), request))


def advice(expectation: Expectation, request: Request) -> str:
    """What to change where the memory of a run that was settled did not suffice, in one sentence."""
    try:
        plan = best_plan(expectation.planner(request.memory_bytes), request)
        return f"By the planner, {smallest_fix(plan)}"
    except Exception:
        # Whatever hinders the planner now, the failure to report is the run's.
        return "More micro-batches, recompute 'stage', the schedule 1f1b or more stages need less."
