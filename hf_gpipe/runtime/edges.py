"""The edges between neighbouring stages: in one process, or between two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hf_gpipe.runtime.channel import Channel, DeviceChannel, LocalChannel, RemoteChannel
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.schedule.messages import Link, communicators, links_between


@dataclass(frozen=True)
class Edge:
    """The two channels between stage s and stage s + 1: activations go down, gradients come up."""

    down: Channel
    up: Channel

    def check(self) -> None:
        """Raise an error if no message can be sent or received any more, after a failed step."""
        self.down.check()
        self.up.check()


def connect(topology: Topology, dtype_of: Callable[[int, str], torch.dtype]) -> dict[int, Edge]:
    """Create the edges of this process's stages, by the number of the stage before each edge.

    Every process must call it, because communicators are created by all processes in the same order.

    Args:
        topology: the processes and which stages they hold.
        dtype_of: type of a carried tensor, from the number of the stage that receives it and its name.
    """
    links = {link: _communicator(topology, link) for link in communicators(topology.placement)}
    edges = {}
    for stage in range(topology.placement.num_stages - 1):
        down, up = links_between(topology.placement, stage)
        if topology.rank not in (down.sender, down.receiver):
            continue
        if down.sender == down.receiver:
            devices = topology.stage_devices[stage], topology.stage_devices[stage + 1]
            edges[stage] = Edge(_within(*devices), _within(*devices[::-1]))
            continue
        is_sender = topology.rank == down.sender
        peer = down.receiver if is_sender else down.sender
        device = topology.stage_devices[stage if is_sender else stage + 1]
        dtypes = partial(dtype_of, stage + 1)
        edges[stage] = Edge(
            RemoteChannel(peer, 2 * stage, links[down], device, dtypes),
            RemoteChannel(peer, 2 * stage + 1, links[up], device, dtypes),
        )
    return edges


def _within(source: torch.device, target: torch.device) -> Channel:
    """A channel between two stages of one process."""
    if source != target and source.type == target.type == "cuda":
        return DeviceChannel(source, target)
    return LocalChannel(target)


def _communicator(topology: Topology, link: Link) -> dist.ProcessGroup:
    """A communicator of two processes on NCCL, ready to use; on gloo that of all, where tags separate the channels."""
    if topology.device.type != "cuda":
        return topology.group_on(topology.device)
    group = topology.new_group(sorted((link.sender, link.receiver)), topology.device)
    if topology.rank in (link.sender, link.receiver):
        # The first message sets the communicator up and waits for the peer. In a step that would be a receive
        # announced ahead, and each of the two processes could wait for the other.
        is_sender = topology.rank == link.sender
        device = torch.device((link.sender_device if is_sender else link.receiver_device) or topology.device)
        token = torch.zeros(1, device=device)
        if is_sender:
            dist.send(token, link.receiver, group=group)
        else:
            dist.recv(token, link.sender, group=group)
        # Both only put the message into a stream. The next communicator is set up when this one is ready.
        torch.cuda.synchronize(device)
    return group
