"""The processes that a plan is for: their device, and what each of them may have of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self, TypeAlias

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.planner.machines.devices import LINKS, Device
from hf_gpipe.planner.machines.network import Network, one_level
from hf_gpipe.schedule import Placement
from hf_gpipe.schedule.messages import Link, communicators
from hf_gpipe.settings.division import Division
from hf_gpipe.text import size_text

MemoryLimit: TypeAlias = int | tuple[int, ...] | None
"""The bytes that any process may use, or a number for each process; None: no limit is known."""

_MIB = 1 << 20
#: torch's allocator puts tensors of less than 1 MiB into segments of 2 MiB, and those of less than 10 MiB into segments
#: of 20 MiB (kSmallBuffer and kLargeBuffer in c10/core/AllocatorConfig.h). One of each kind is not full.
_SEGMENTS_BYTES = 22 * _MIB
#: NCCL's buffers for a channel at the receiving and at the sending end of a connection (the lines of
#: NCCL_DEBUG_SUBSYS=ALLOC in issue 1685 of github.com/NVIDIA/nccl). The first has NCCL_BUFFSIZE, of 4 MiB, and the
#: buffers of the protocols LL and LL128.
_RECEIVING_BYTES, _SENDING_BYTES = 10 * _MIB, 2 * _MIB
_BOTH_BYTES = _RECEIVING_BYTES + _SENDING_BYTES
#: Channels of messages between two GPUs, and of sums in a ring: 32 and 24 over the NVLinks of an A100 or a newer GPU, 2
#: over anything else (NCCL's line "coll channels, ... p2p channels per peer" in issues 1685, 1781, 1189 and 1424).
_NVLINK_CHANNELS, _CHANNELS = (32, 24), (2, 2)

#: The ratio of memory below which devices are alike: equal devices differ a little in free memory.
ALIKE = 1.05


class Processes:
    """The processes that a plan is for.

    Args:
        memory_bytes: the most that a process may use, or one number for each process; None: the device's memory, where
            that is known.
        cluster: the links between the processes; None: every pair of them has the device's link.
        speeds: the speed of each process, relative to `device`; None: all are as fast.
        division: how layers are divided. A process of the plan then stands for the ranks of a worker, each of which has
            this memory; the links of the cluster are between devices.
    """

    def __init__(
        self,
        device: Device,
        memory_bytes: MemoryLimit = None,
        cluster: Cluster | None = None,
        speeds: Sequence[float] | None = None,
        division: Division = Division(),
    ) -> None:
        self.device, self.speeds, self.division = device, speeds, division
        self.memory_bytes = device.memory_bytes if memory_bytes is None else memory_bytes
        self.cluster = None if cluster is None else division.cluster_of(cluster)
        self.link = device.link if cluster is None else cluster.levels[0]

    def within(self, memory_bytes: MemoryLimit) -> Self:
        """Replace the limit of memory. The copy shares what was computed."""
        other = copy.copy(self)
        other.memory_bytes = memory_bytes
        return other

    def limit_of(self, process: int) -> int | None:
        """The most bytes that a process may use; None: no limit is known."""
        return self.memory_bytes[process] if isinstance(self.memory_bytes, tuple) else self.memory_bytes

    def limits_of(self, placement: Placement) -> list[int | None]:
        """The limit of a process that holds a stage, for each stage: the smallest of its replicas' limits."""
        limits = [[self.limit_of(process) for process in own] for own in placement.workers]
        return [min((limit for limit in own if limit is not None), default=None) for own in limits]

    def speeds_of(self, placement: Placement) -> list[float]:
        """The relative speed of each stage's slowest replica, for which the other replicas wait."""
        if self.speeds is None:
            return [1.0] * placement.num_stages
        return [min(self.speeds[process] for process in own) for own in placement.workers]

    def check_processes(self, placement: Placement) -> None:
        """Raise UserError where the number of limits or speeds is not the number of processes."""
        for name, values in (("memory", self.memory_bytes), ("speeds", self.speeds)):
            if isinstance(values, Sequence) and len(values) != placement.num_processes:
                raise UserError(
                    f"{name} has {len(values)} entries and the plan has {placement.num_processes} processes; give one "
                    "entry for each process."
                )

    def classes(self, num_processes: int) -> Sequence[int]:
        """The number of each process's class. Processes of one class have the same speed, and limits that are `ALIKE`.

        Classes are numbered in the order of their first process. A plan must fit the limit of each process all the
        same.
        """
        limits = [self.limit_of(process) or 0 for process in range(num_processes)]
        least_alike: dict[float, float] = {}
        for limit in sorted(set(limits)):
            least = next(reversed(least_alike.values()), limit)
            least_alike[limit] = least if limit < ALIKE * least else limit
        speeds = self.speeds or [1.0] * num_processes
        devices = [(least_alike[limit], speeds[process]) for process, limit in enumerate(limits)]
        numbers = {device: number for number, device in enumerate(dict.fromkeys(devices))}
        return [numbers[device] for device in devices]

    @property
    def limit_text(self) -> str:
        """The limit of memory for people: "80 GiB", or "24 GiB, 12 GiB" for each process."""
        limit = self.memory_bytes
        if limit is None:
            return "not known"
        return ", ".join(map(size_text, limit)) if isinstance(limit, tuple) else size_text(limit)

    @property
    def text(self) -> str:
        """The memory of each process, and their speeds."""
        speeds = "" if self.speeds is None else f", relative speeds {', '.join(f'{speed:g}' for speed in self.speeds)}"
        limit = self.memory_bytes
        memory = "memory not known" if limit is None else self.limit_text + " each" * isinstance(limit, int)
        return f"{memory}{speeds}"

    def network(self, placement: Placement) -> Network:
        """The links between the workers of a placement."""
        return Network(self.cluster or one_level(self.device, placement.num_processes), placement)

    def host_size(self, num_processes: int) -> int:
        """The number of workers that a machine has; all of them in a cluster of one level."""
        is_one = self.cluster is None or len(self.cluster.levels) == 1
        return num_processes if is_one or self.cluster is None else min(self.cluster.devices_in(1), num_processes)

    def num_copying(self, num_workers: int) -> int:
        """The number of devices that copy to and from the memory of one machine, all ranks of `num_workers` counted."""
        return self.division.num_ranks * self.host_size(num_workers)


def library_bytes(processes: Processes, placement: Placement, links: Sequence[Link] = ()) -> tuple[int, ...]:
    """The bytes that cuBLAS, NCCL and torch's allocator take beside tensors, on each device of each worker of a
    placement; 0 without CUDA. The workers have connections between stages, and others (`links`).

    CUDA's context is taken off the memory of the devices (devices.py). What NCCL takes for NVLink SHARP and for trees
    of several machines is not counted.
    """
    device, network = processes.device, processes.network(placement)
    if device.workspace_bytes is None:
        return (0,) * placement.num_processes
    sizes = [device.workspace_bytes + _SEGMENTS_BYTES] * placement.num_processes
    for link in (*communicators(placement), *links):
        of_messages, _ = _channels(network.slowest_rate((link.sender, link.receiver)))
        sizes[link.sender] += of_messages * _SENDING_BYTES
        sizes[link.receiver] += of_messages * _RECEIVING_BYTES
    # In a ring each member receives and sends: all processes for sums such as the loss, and the replicas of stages.
    everyone = tuple(range(placement.num_processes))
    for group in {everyone, *placement.groups}:
        for worker in group if len(group) > 1 else ():
            sizes[worker] += _channels(network.slowest_rate(group))[1] * _BOTH_BYTES
    of_ranks = _channels(device.link.bytes_per_second)[1] * _BOTH_BYTES * (not processes.division.is_whole)
    return tuple(size + of_ranks for size in sizes)


def _channels(bytes_per_second: float) -> tuple[int, int]:
    return _NVLINK_CHANNELS if bytes_per_second >= LINKS["nvlink3"].bytes_per_second else _CHANNELS
