"""What the planner decides for a `Pipeline` that is being made: the same in every process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.planner.costs import ModelCosts, mean_costs
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.profile import profile_layers
from hf_gpipe.planner.resolve import best_plan, micro_batch_counts, resolve
from hf_gpipe.planner.settings import Request, Settled
from hf_gpipe.planner.this_machine import this_machine
from hf_gpipe.planner.workload import Workload, largest_micro_batch
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.topology import Topology


@dataclass(frozen=True)
class Expectation:
    """What the planner of a `Pipeline` reckons with.

    Attributes:
        example: a mini-batch like those to come, or its shape; read in the main process. None: nothing is known.
        adapter: the model's.
        peft: PEFT layers that alone are trained.
        loss: of the target tokens.
        topology: the processes, and their devices.
        mini_batches: accumulated in a step.
    """

    example: Mapping[str, torch.Tensor] | Workload | None
    adapter: Adapter
    peft: PeftAdapter | None
    loss: TokenLoss
    topology: Topology
    mini_batches: int = 1

    def mini_batch(self) -> Workload:
        """Its shape. Raises UserError without an example."""
        if self.example is None:
            raise UserError(
                "the planner needs the shape of a mini-batch to choose auto values or to cut the model by cost: give "
                "example=, a mini-batch as long as the longest to come"
            )
        return self.example if isinstance(self.example, Workload) else Workload.of_batch(self.example)

    def planner(self, memory_bytes: int | None, measured: Mapping[int, ModelCosts] | None = None) -> Planner:
        """For the device of this process.

        Args:
            memory_bytes: the limit; None: the device's memory.
            measured: by the rows of a micro-batch, the costs with seconds.

        Raises:
            UserError: there is no example.
        """
        return Planner.of(
            self.adapter,
            self.mini_batch(),
            this_machine(self.topology.device, self.topology.num_processes),
            peft=self.peft,
            loss=self.loss,
            as_on_gpu=self.topology.device.type == "cuda",
            measured=measured,
            memory_bytes=memory_bytes,
            mini_batches=self.mini_batches,
        )

    def plan(self, request: Request) -> Plan:
        """What the planner predicts of it. Raises UserError where there is no example, or nothing that could be run."""
        return best_plan(self.planner(request.memory_bytes), request)


def settle(expectation: Expectation, request: Request) -> Settled:
    """Decide what a request leaves open. Every process calls it; the main process decides for its own device.

    Raises:
        UserError: on every process: no example, or nothing that could be run.
    """
    measured = _measure(expectation, request) if request.partition == "profile" else None
    return expectation.topology.from_main(lambda: resolve(expectation.planner(request.memory_bytes, measured), request))


def _measure(expectation: Expectation, request: Request) -> dict[int, ModelCosts]:
    """The costs of each size of micro-batch that may be chosen, measured by all processes at once, as in a run."""
    topology = expectation.topology
    mini_batch = topology.from_main(expectation.mini_batch)
    measured = {}
    for count in micro_batch_counts(mini_batch.rows, request.num_micro_batches):
        rows = largest_micro_batch(mini_batch.rows, count)
        own = profile_layers(
            expectation.adapter,
            replace(mini_batch, rows=rows),
            topology.device,
            peft=expectation.peft,
            loss=expectation.loss,
            barrier=topology.barrier,
        )
        measured[rows] = mean_costs(topology.gather_objects(own))
    return measured
