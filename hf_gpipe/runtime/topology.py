"""The processes of a pipeline, the stages of each process, and their devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.runtime.processes import Processes
from hf_gpipe.schedule.actions import Placement

DeviceChoice: TypeAlias = torch.device | str | Sequence[str] | None
"""Where a process computes: a device, a list of devices for its stages, or None to choose one."""


@dataclass(frozen=True)
class Topology(Processes):
    """The processes of a pipeline, which stages each of them holds, and the devices of this one."""

    placement: Placement
    device: torch.device
    """This process's first device, for computations outside of the stages."""
    stage_devices: Mapping[int, torch.device]
    """The device of each of this process's stages."""

    @classmethod
    def discover(
        cls,
        num_stages: int,
        device: DeviceChoice = None,
        place: Callable[[int, int], Placement] = Placement.spread,
    ) -> Topology:
        """Place `num_stages` on the processes of the running job, and this process's stages on its devices.

        Args:
            num_stages: K.
            device: where this process computes; None: a CUDA device of its own where there is one, else the CPU. A list
                names the devices of all processes of this machine, each of which takes an equal part, in order; a
                process spreads its stages over its devices, consecutive ones together.
            place: (number of stages, number of processes) -> where each stage is.

        Raises:
            UserError: the job has more processes than stages, or a device does not exist or has no stage.
        """
        processes = Processes.of_job()
        rank, num_processes = processes.rank, processes.num_processes
        if num_processes > num_stages:
            raise UserError(
                f"{num_processes} processes were started for num_stages={num_stages}: a process holds at least one "
                f"stage; start at most {num_stages} processes or raise num_stages"
            )
        placement = place(num_stages, num_processes)
        devices, own = _own_devices(device), placement.stages_of(rank)
        if len(devices) > len(own):
            raise UserError(
                f"{len(devices)} devices for the {len(own)} stages of process {rank}: {', '.join(map(str, devices))}; "
                "name at most one per stage"
            )
        stage_devices = {stage: devices[i * len(devices) // len(own)] for i, stage in enumerate(own)}
        topology = cls(rank, num_processes, placement, devices[0], stage_devices)
        topology._check_one_kind()
        if device is None or isinstance(device, str | torch.device):
            return topology
        names: dict[int, str] = {}
        for part in topology.gather_objects({stage: str(one) for stage, one in stage_devices.items()}):
            names.update(part)
        return replace(topology, placement=replace(placement, devices=tuple(names[s] for s in range(num_stages))))

    def _check_one_kind(self) -> None:
        """Messages between processes travel between CUDA devices, by NCCL, or between CPUs, by gloo."""
        everyone = self.gather_objects(sorted({str(one) for one in (self.device, *self.stage_devices.values())}))
        if self.num_processes > 1 and len({one.partition(":")[0] for own in everyone for one in own}) > 1:
            found = "; ".join(f"process {rank}: {', '.join(own)}" for rank, own in enumerate(everyone))
            raise UserError(
                f"devices of several kinds ({found}): with several processes all stages are on CUDA devices, or all on "
                "the CPU; name devices of one kind, or use one process"
            )

    @property
    def local_stages(self) -> tuple[int, ...]:
        return tuple(self.placement.stages_of(self.rank))

    def process_of(self, stage: int) -> int:
        return self.placement.processes[stage]


def _own_devices(choice: DeviceChoice) -> list[torch.device]:
    """The devices of this process, in order."""
    if choice is None or isinstance(choice, str | torch.device):
        return [pick_device(choice)]
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1
    if not choice or len(choice) % processes:
        raise UserError(
            f"devices {list(choice)}: {len(choice)} cannot be shared out evenly between the {processes} processes of "
            "this machine; name as many for each"
        )
    share = len(choice) // processes
    first = share * (dist.get_node_local_rank(fallback_rank=0) if dist.is_initialized() else 0)
    # `pick_device` sets torch's current device, which must be the first, so that is picked last.
    return [pick_device(name) for name in reversed(choice[first : first + share])][::-1]


def pick_device(device: torch.device | str | None) -> torch.device:
    """The device of this process.

    Raises UserError if CUDA is asked for and not available.
    """
    if device is None or str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {str(device)!r} is not one of torch's; use cpu or cuda") from error
    if chosen.type != "cuda":
        return chosen
    if not torch.cuda.is_available():
        raise UserError(f"device {str(device)!r} was asked for and torch finds no CUDA device; use device: cpu")
    if str(chosen) == "cuda":  # without an index: one device per process
        local_rank = dist.get_node_local_rank(fallback_rank=0) if dist.is_initialized() else 0
        chosen = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen
