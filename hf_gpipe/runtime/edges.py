"""The edges between neighbouring stages: in one process, or between two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hf_gpipe.runtime.channel import Channel, DeviceChannel, LocalChannel, RemoteChannel
from hf_gpipe.runtime.topology import Topology


@dataclass(frozen=True)
class Edge:
    """The two channels between stage s and stage s + 1: activations go down, gradients come up."""

    down: Channel
    up: Channel


def connect(topology: Topology, dtype_of: Callable[[int, str], torch.dtype]) -> dict[int, Edge]:
    """Create the edges of this process's stages, by the number of the stage before each edge.

    Every process must call it, because communicators are created by all processes in the same order.

    Args:
        topology: the processes and which stages they hold.
        dtype_of: type of a carried tensor, from the number of the stage that receives it and its name.
    """
    edges = {}
    for stage in range(topology.placement.num_stages - 1):
        ends = topology.process_of(stage), topology.process_of(stage + 1)
        if ends[0] == ends[1]:
            if topology.rank == ends[0]:
                devices = topology.stage_devices[stage], topology.stage_devices[stage + 1]
                edges[stage] = Edge(_within(*devices), _within(*devices[::-1]))
            continue
        is_sender = topology.rank == ends[0]
        device = topology.stage_devices.get(stage if is_sender else stage + 1, topology.device)
        # Opposing messages on one NCCL communicator wait for each other, so each direction has its own.
        groups = [_communicator(topology, sender, receiver, device) for sender, receiver in (ends, ends[::-1])]
        if topology.rank in ends:
            peer = ends[1] if is_sender else ends[0]
            dtypes = partial(dtype_of, stage + 1)
            channels = [
                RemoteChannel(peer, 2 * stage + direction, group, device, dtypes)
                for direction, group in enumerate(groups)
            ]
            edges[stage] = Edge(*channels)
    return edges


def _within(source: torch.device, target: torch.device) -> Channel:
    """A channel between two stages of one process."""
    if source != target and source.type == target.type == "cuda":
        return DeviceChannel(source, target)
    return LocalChannel(target)


def _communicator(topology: Topology, sender: int, receiver: int, device: torch.device) -> dist.ProcessGroup:
    """A communicator of two processes on NCCL, ready to use; on gloo that of all, where tags separate the channels."""
    if device.type != "cuda":
        return topology.group_on(device)
    group = topology.new_group(sorted((sender, receiver)), device)
    if topology.rank in (sender, receiver):
        # The first message sets the communicator up and waits for the peer. In a step that would be a receive
        # announced ahead, and each of the two processes could wait for the other.
        token = torch.zeros(1, device=device)
        if topology.rank == sender:
            dist.send(token, receiver, group=group)
        else:
            dist.recv(token, sender, group=group)
    return group
