"""The machines of a job and the links between them: which processes are where, and how fast their messages are."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from hf_gpipe.job.world import MeasuredLink, World
from hf_gpipe.partition.cluster import Cluster, Level
from hf_gpipe.schedule.placement import Placement

#: The seconds and the round trips that the last of growing messages must take, unless it has the last size. TCP
#: begins slowly: on a link with a delay, the first round trips of a message carry little.
_LONG_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS = 0.05, 20
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1 << 16, 1 << 25, 8
_NUM_TRIPS = 5


def measure_machines(world: World) -> None:
    """Measure the links that follow machine by machine, before there is a plan. Every process calls it."""
    names = list(dict.fromkeys(world.hosts))
    following = pairwise([*names, names[0]] if len(names) > 2 else names)
    measure(world, [(world.hosts.index(host), world.hosts.index(other)) for host, other in following])


def measure(world: World, pairs: Sequence[tuple[int, int]]) -> list[MeasuredLink]:
    """The links between pairs of processes. Those that were not measured yet are measured. Every process calls it."""
    ends = [frozenset(world.hosts[rank] for rank in pair) for pair in pairs]
    mine: list[tuple[tuple[int, int], tuple[float, float]]] = []
    # One after the other.
    for first, second in [pair for pair, hosts in zip(pairs, ends, strict=True) if hosts not in world.links]:
        if world.rank == first:
            mine.append(((first, second), _send_and_measure(world, second)))
        elif world.rank == second:
            _answer(world, first)
        world.barrier()
    for pair, measured in (entry for own in world.gather_objects(mine) for entry in own):
        hosts = world.hosts[pair[0]], world.hosts[pair[1]]
        world.links[frozenset(hosts)] = MeasuredLink(hosts, pair, *measured)
    return [world.links[hosts] for hosts in ends]


def cluster_of(world: World, inside: Level) -> Cluster | None:
    """The machines as a cluster with the slowest measured link between two machines; None: no link was measured.

    Args:
        world: the processes, with their measured links.
        inside: the link between the processes of a machine.
    """
    between = [link for ends, link in world.links.items() if len(ends) > 1]
    if not between:
        return None
    slowest = min(link.bytes_per_second for link in between), max(link.latency_seconds for link in between)
    counts = Counter(world.hosts)
    names, count = list(counts), counts[world.hosts[0]]
    if world.hosts != tuple(name for name in names for _ in range(count)):
        # Levels have equal parts. Without levels no link is assumed to be faster than it is.
        return Cluster((Level(len(world.hosts), *slowest),))
    machine = Level(count, inside.bytes_per_second, inside.latency_seconds)
    return Cluster((machine, Level(len(names), *slowest)))


def steady(cluster: Cluster) -> Cluster:
    """Round a measured cluster to powers of two, so that a slightly different measurement decides the same."""

    def rounded(value: float) -> float:
        return 2.0 ** round(math.log2(value)) if value else value

    return Cluster(
        tuple(
            Level(level.parts, rounded(level.bytes_per_second), rounded(level.latency_seconds))
            for level in cluster.levels
        )
    )


def pairs_to_measure(placement: Placement, hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Two processes for each pair of machines between which a plan sends; on one machine alone, two of its processes.

    Args:
        placement: the stages' placement: its edges, and the rings of each stage's replicas, send messages.
        hosts: the machine of each process.
    """
    sending = {(worker, following) for _, worker, following in placement.edges if worker != following}
    for group in placement.groups:
        sending |= set(zip(group, (*group[1:], group[0]), strict=True))
    sending = {(placement.ranks_of(worker)[0], placement.ranks_of(other)[0]) for worker, other in sending}
    is_one = len(set(hosts)) == 1
    first: dict[frozenset[str], tuple[int, int]] = {}
    for pair in sorted(tuple(sorted(pair)) for pair in sending):
        ends = frozenset(hosts[rank] for rank in pair)
        if is_one or len(ends) > 1:
            first.setdefault(ends, (pair[0], pair[1]))
    return list(first.values())


def _send_and_measure(world: World, peer: int) -> tuple[float, float]:
    """The bytes per second and the seconds of latency to a process that calls `_answer`."""
    device, group = world.device, world.group_on(world.device)
    token = torch.zeros(1, dtype=torch.int64, device=device)

    def trip(size: int) -> float:
        """The seconds until a message of `size` bytes has arrived and the answer is here."""
        content = torch.zeros(size, dtype=torch.uint8, device=device)
        dist.send(torch.tensor([size], device=device), group_dst=peer, group=group)
        dist.recv(token, group_src=peer, group=group)
        token.item()  # on a GPU only this waits for the message
        start = time.perf_counter()
        dist.send(content, group_dst=peer, group=group)
        dist.recv(token, group_src=peer, group=group)
        token.item()
        return time.perf_counter() - start

    # The first message connects the two.
    round_trip = median([trip(1) for _ in range(_NUM_TRIPS)][1:])
    size, enough = _FIRST_BYTES, max(_LONG_ENOUGH_SECONDS, _ENOUGH_ROUND_TRIPS * round_trip)
    while (seconds := trip(size)) < enough and size < _LAST_BYTES:
        size *= _GROWTH
    dist.send(torch.tensor([0], device=device), group_dst=peer, group=group)
    return size / max(seconds - round_trip / 2, 1e-9), round_trip / 2


def _answer(world: World, peer: int) -> None:
    device, group = world.device, world.group_on(world.device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(token, group_src=peer, group=group)
        size = int(token.item())
        if size == 0:
            return
        dist.send(token, group_dst=peer, group=group)
        dist.recv(torch.empty(size, dtype=torch.uint8, device=device), group_src=peer, group=group)
        dist.send(token, group_dst=peer, group=group)
