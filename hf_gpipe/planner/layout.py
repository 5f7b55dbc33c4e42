"""Configurations laid out over processes: what the memory, the time and the messages of a plan are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_gpipe.planner.costs.stage_costs import StageCosts, StageLayers
from hf_gpipe.planner.machines.processes import Processes
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.schedule import Schedule
from hf_gpipe.schedule.kinds import RECOMPUTE
from hf_gpipe.settings.pipeline import DecidedConfig


@dataclass(frozen=True)
class Layout:
    """A configuration with its stages and its table on the processes that it is planned for."""

    settings: DecidedConfig
    inputs: PlanInputs
    processes: Processes
    sums: StageCosts
    """The costs for one micro-batch, or for the typical chunk of its rows."""
    of_chunks: Sequence[StageCosts]
    """The costs for each chunk."""
    stages: Sequence[StageLayers]
    table: Schedule
    library_bytes: Sequence[int]
    """The bytes that libraries take of the GPU of each process."""

    @cached_property
    def recompute_shares(self) -> list[float]:
        """The share of the micro-batches whose forward the table repeats, for each stage."""
        table = self.table
        return [table.num_actions(stage, RECOMPUTE) / table.num_micro_batches for stage in range(table.num_stages)]

    def state_bytes(self, stage: int, size: Parameters) -> float:
        """The bytes of the optimizer's state that a process has of trainable weights of a stage."""
        num_replicas = self.table.placement.replicas[stage]
        return self.inputs.state_bytes(size, self.sums.costs.dtype) / self.settings.shared_updates.among(num_replicas)
