"""The memory of a GPU that libraries take beside tensors: cuBLAS, NCCL and torch's allocator.

The context of CUDA is not counted here: it is taken off the memory of the devices (devices.py). What NCCL takes for
NVLink SHARP and for trees of several machines is not counted either.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.planner.machines.devices import LINKS
from hf_gpipe.planner.machines.processes import Processes
from hf_gpipe.schedule import Placement
from hf_gpipe.schedule.messages import Link, communicators

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


def library_bytes(processes: Processes, placement: Placement, links: Sequence[Link] = ()) -> tuple[int, ...]:
    """The bytes that libraries take on each device of each worker of a placement; 0 without CUDA.

    The workers have connections between stages, and others (`links`).
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
