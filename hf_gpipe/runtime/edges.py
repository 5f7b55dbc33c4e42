"""The edges between neighbouring stages: in one process, or between two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from hf_gpipe.runtime.channel import (
    Channel,
    DeviceChannel,
    LocalChannel,
    NarrowChannel,
    RemoteChannel,
    RoutedChannel,
    narrowed,
)
from hf_gpipe.runtime.world import World
from hf_gpipe.schedule.messages import Link, communicators, links_between


@dataclass(frozen=True)
class Edge:
    """The two channels between stage s and stage s + 1: activations go down, gradients come up.

    Where a stage has replicas, the micro-batch decides which of them sends and receives.
    """

    down: Channel
    up: Channel

    def check(self) -> None:
        """Raise an error if no message can be sent or received any more, after a failed step."""
        self.down.check()
        self.up.check()

    def narrow(self, sent: torch.dtype | None, dtype_of: Callable[[str], torch.dtype]) -> Edge:
        """The edge on which wider tensors travel in the type `sent`; itself for None."""
        if sent is None:
            return self
        return Edge(NarrowChannel(self.down, sent, dtype_of), NarrowChannel(self.up, sent, dtype_of))


def connect(
    world: World, dtype_of: Callable[[int, str], torch.dtype], sent: torch.dtype | None = None
) -> dict[int, Edge]:
    """Create the edges of this process's stages, by the number of the stage before each edge.

    Every process must call it, because communicators are created by all processes in the same order.

    Args:
        world: the processes and which stages they hold.
        dtype_of: type of a carried tensor, from the number of the stage that receives it and its name.
        sent: type in which wider ones travel, also between stages of one process, so that the numbers do not depend on
            the processes; None: their own.
    """
    links = {link: _communicator(world, link) for link in communicators(world.placement)}
    between: dict[tuple[int, int, int], Edge] = {}
    for stage, worker, following in world.placement.edges:
        if world.rank not in (worker, following):
            continue
        if worker == following:
            devices = world.stage_devices[stage], world.stage_devices[stage + 1]
            edge = Edge(_within(*devices), _within(*devices[::-1]))
            between[stage, worker, following] = edge.narrow(sent, partial(dtype_of, stage + 1))
            continue
        down, up = links_between(world.placement, stage, worker, following)
        is_sender = world.rank == worker
        peer = following if is_sender else worker
        device = world.stage_devices[stage if is_sender else stage + 1]
        dtypes = partial(dtype_of, stage + 1)
        sent_dtypes = partial(_sent_dtype, dtypes, sent)
        edge = Edge(
            RemoteChannel(peer, 2 * stage, links[down], device, sent_dtypes),
            RemoteChannel(peer, 2 * stage + 1, links[up], device, sent_dtypes),
        )
        between[stage, worker, following] = edge.narrow(sent, dtypes)
    edges = {}
    for stage, (own, other) in enumerate(pairwise(world.placement.workers)):
        # The replicas of both stages are the same again after so many micro-batches.
        count = math.lcm(len(own), len(other))
        routes = [between.get((stage, own[m % len(own)], other[m % len(other)])) for m in range(count)]
        if count == 1 and routes[0] is not None:
            edges[stage] = routes[0]
        elif any(routes):
            edges[stage] = Edge(
                RoutedChannel([None if edge is None else edge.down for edge in routes]),
                RoutedChannel([None if edge is None else edge.up for edge in routes]),
            )
    return edges


def _sent_dtype(dtype_of: Callable[[str], torch.dtype], sent: torch.dtype | None, name: str) -> torch.dtype:
    return narrowed(dtype_of(name), sent)


def _within(source: torch.device, target: torch.device) -> Channel:
    """A channel between two stages of one process."""
    if source != target and source.type == target.type == "cuda":
        return DeviceChannel(source, target)
    return LocalChannel(target)


def _communicator(world: World, link: Link) -> dist.ProcessGroup:
    """A communicator of two processes on NCCL, ready to use; on gloo that of all, where tags separate the channels."""
    if world.device.type != "cuda":
        return world.group_on(world.device)
    group = world.new_group(sorted((link.sender, link.receiver)), world.device)
    if world.rank in (link.sender, link.receiver):
        # The first message sets the communicator up and waits for the peer. In a step that would be a receive
        # announced ahead, and each of the two processes could wait for the other.
        is_sender = world.rank == link.sender
        device = torch.device((link.sender_device if is_sender else link.receiver_device) or world.device)
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        if is_sender:
            dist.send(token, link.receiver, group=group)
        else:
            dist.recv(token, link.sender, group=group)
        # Both only put the message into a stream. The next communicator is set up when this one is ready.
        torch.cuda.synchronize(device)
    return group
