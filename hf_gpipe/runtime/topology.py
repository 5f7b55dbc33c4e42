"""The processes of a pipeline, the stages of each process, and their devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hf_gpipe.errors import UserError
from hf_gpipe.runtime.processes import Processes
from hf_gpipe.schedule.actions import Placement


@dataclass(frozen=True)
class Topology(Processes):
    """The processes of a pipeline, which stages each of them holds, and on which of its devices."""

    placement: Placement
    stage_devices: Mapping[int, torch.device]
    """The device of each of this process's stages."""

    @classmethod
    def of(cls, processes: Processes, placement: Placement) -> Topology:
        """Spread the stages of each process over its devices, consecutive ones together. Every process must call it.

        The result's placement names the devices of all stages, if a process has several.

        Raises:
            UserError: on every process, if one has more devices than stages, or not all compute on the same kind.
        """
        rank, devices = processes.rank, processes.devices
        names: dict[int, str] = {}
        has_several = False
        everyone = processes.gather_objects([str(device) for device in devices])
        _check_one_kind(everyone)
        for process, given in enumerate(everyone):
            stages = placement.stages_of(process)
            if len(given) > len(stages):
                raise UserError(
                    f"{len(given)} devices for the {len(stages)} stages of process {process}: {', '.join(given)}; "
                    "name at most one per stage"
                )
            names.update({stage: given[i * len(given) // len(stages)] for i, stage in enumerate(stages)})
            has_several |= len(given) > 1
        if has_several:
            placement = replace(placement, devices=tuple(names[stage] for stage in range(placement.num_stages)))
        stage_devices = {stage: torch.device(names[stage]) for stage in placement.stages_of(rank)}
        return cls(rank, processes.num_processes, devices, placement, stage_devices)

    @property
    def local_stages(self) -> tuple[int, ...]:
        return tuple(self.placement.stages_of(self.rank))

    def process_of(self, stage: int) -> int:
        return self.placement.processes[stage]


def _check_one_kind(everyone: list[list[str]]) -> None:
    """Messages between processes travel between CUDA devices, by NCCL, or between CPUs, by gloo."""
    kinds = {device.partition(":")[0] for own in everyone for device in own}
    if len(everyone) > 1 and len(kinds) > 1:
        found = "; ".join(f"process {rank}: {', '.join(own)}" for rank, own in enumerate(everyone))
        raise UserError(
            f"devices of several kinds ({found}): with several processes all stages are on CUDA devices, or all on "
            "the CPU; name devices of one kind, or use one process"
        )
