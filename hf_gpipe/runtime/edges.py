"""Creates the channels between stages, in one process or between two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from hf_gpipe.runtime.channel import Channel, DeviceChannel, LocalChannel, RemoteChannel, narrowed
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.schedule.messages import Link, communicators, links_between


@dataclass(frozen=True)
class Edge:
    """The two channels between a stage and the next, on one worker of each: activations go down, gradients come up."""

    down: Channel
    up: Channel


Edges: TypeAlias = Mapping[tuple[int, int, int], Edge]
"""Edges by (the stage before the edge, its worker, the worker of the stage after the edge)."""


def connect(
    world: Mesh, dtype_of: Callable[[int, str], torch.dtype], sent: torch.dtype | None = None
) -> dict[tuple[int, int, int], Edge]:
    """Create the edges of this process's stages.

    Every process must call it, because communicators are created by all processes in the same order.

    Args:
        dtype_of: function from (number of the receiving stage, name of a carried tensor) to the tensor's dtype.
        sent: dtype in which wider floating-point tensors are sent, also between stages of one process, so that the
            numbers do not depend on the number of processes. None: each tensor is sent in its own dtype.
    """
    links = {link: communicator(world, link) for link in communicators(world.placement)}
    edges: dict[tuple[int, int, int], Edge] = {}
    for stage, worker, following in world.placement.edges:
        if {worker, following} & {*world.workers}:
            dtypes, stages = partial(dtype_of, stage + 1), (stage, stage + 1)
            edge = connect_edge(world, links, stages, (worker, following), stage, partial(_sent_dtype, dtypes, sent))
            if sent is not None:
                edge.down.narrow = edge.up.narrow = sent, dtypes
            edges[stage, worker, following] = edge
    return edges


def connect_edge(
    world: Mesh,
    links: Mapping[Link, dist.ProcessGroup],
    stages: tuple[int, int],
    workers: tuple[int, int],
    number: int,
    dtype_of: Callable[[str], torch.dtype],
) -> Edge:
    """The edge between two stages, on one worker of each. `number` differs between edges of the same two workers."""
    (lower, upper), (worker, following) = stages, workers
    if {worker, following} <= {*world.workers}:
        devices = world.device_of(worker, lower), world.device_of(following, upper)
        return Edge(_within(*devices), _within(*devices[::-1]))
    down, up = links_between(world.placement, lower, worker, following, upper)
    is_sender = worker in world.workers
    peer = world.peer(following if is_sender else worker)
    device = world.device_of(worker, lower) if is_sender else world.device_of(following, upper)
    return Edge(
        RemoteChannel(peer, 2 * number, links[down], device, dtype_of),
        RemoteChannel(peer, 2 * number + 1, links[up], device, dtype_of),
    )


def _sent_dtype(dtype_of: Callable[[str], torch.dtype], sent: torch.dtype | None, name: str) -> torch.dtype:
    return narrowed(dtype_of(name), sent)


def _within(source: torch.device, target: torch.device) -> Channel:
    """A channel between two stages of one process."""
    if source != target and source.type == target.type == "cuda":
        return DeviceChannel(source, target)
    return LocalChannel(target)


def communicator(world: Mesh, link: Link) -> dist.ProcessGroup:
    """On NCCL a communicator of two ranks, ready to use; on gloo that of all ranks, where tags separate channels."""
    if world.device.type != "cuda":
        return world.group_on(world.device)
    sender, receiver = map(world.peer, (link.sender, link.receiver))
    group = world.new_group(sorted((sender, receiver)), world.device)
    if world.rank in (sender, receiver):
        # The first message sets up the communicator and waits for the peer. If it were the first message of a step,
        # a receive that starts ahead of its action, each process could wait for the other.
        is_sender = world.rank == sender
        device = torch.device((link.sender_device if is_sender else link.receiver_device) or world.device)
        token = torch.zeros(1, dtype=torch.uint8, device=device)
        if is_sender:
            dist.send(token, receiver, group=group)
        else:
            dist.recv(token, sender, group=group)
        # Both calls only put the message into a stream. Wait, so that communicators are set up one after another.
        torch.cuda.synchronize(device)
    return group
