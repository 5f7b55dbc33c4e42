"""Seconds of messages and of reductions over the links between processes.

The links are those of a cluster's levels: two processes of one machine exchange tensors over the innermost one. Without
a cluster every pair of processes has the device's link, which is a cluster of one level.

Flows that leave a part of the cluster at the same time share its link. It is assumed that all workers of a part that
send over a boundary do so at once, and that all reductions that leave a part run at once. So times on a shared link are
upper bounds, and those on the innermost level, where each device has a link of its own, are not affected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import CLUSTERS, Cluster, Level, parse_cluster
from hf_gpipe.planner.machines.devices import LINKS, Device
from hf_gpipe.schedule import Placement

#: The link between machines where a cluster's text names none.
BETWEEN_MACHINES = LINKS["ethernet-100"]


def read_cluster(text: str, device: Device) -> Cluster:
    """Read the cluster of a text as `parse_cluster` does, or of two counts alone, such as 4x8.

    Args:
        text: the text. With two counts alone, the devices of a machine have the link of `device`, and machines have
            `BETWEEN_MACHINES`.
        device: the device of every process.

    Raises:
        UserError: the text cannot be read.
    """
    counts = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if counts is None:
        return parse_cluster(text)
    links = zip((int(counts[2]), int(counts[1])), (device.link, BETWEEN_MACHINES), strict=True)
    return Cluster(tuple(replace(link, parts=count) for count, link in links))


def is_cluster(text: str) -> bool:
    """Whether a text describes levels, and not a number of devices."""
    return text in CLUSTERS or "x" in text or "@" in text


def one_level(device: Device, num_devices: int) -> Cluster:
    """A cluster of `num_devices`, each pair of which has the device's link."""
    return Cluster((replace(device.link, parts=num_devices),))


class Network:
    """The links between the workers of a placement.

    Args:
        cluster: the cluster, whose ranks are the workers; it has at least as many devices.

    Raises:
        UserError: there are more workers than devices.
    """

    def __init__(self, cluster: Cluster, placement: Placement) -> None:
        if placement.num_processes > cluster.num_devices:
            raise UserError(
                f"the plan has {placement.num_processes} processes and the cluster {cluster} {cluster.num_devices} "
                "devices; each process needs one."
            )
        self._cluster, self._placement = cluster, placement

    def transfer_seconds(self, boundary_bytes: Sequence[float]) -> Mapping[tuple[int, int, int], float]:
        """The seconds of a message on each of `Placement.edges`; 0 inside of a process.

        Args:
            boundary_bytes: the bytes of a message over each boundary (K-1 values).
        """
        edges = self._placement.edges
        seconds, ways = dict.fromkeys(edges, 0.0), dict[tuple[int, int, int], tuple[int, int, int]]()
        senders: dict[tuple[int, int, int], set[int]] = {}
        for boundary, source, target in edges:
            if depth := self._depth((source, target)):
                way = ways[boundary, source, target] = boundary, depth, self._part(source, depth)
                senders.setdefault(way, set()).add(source)
        for edge, way in ways.items():
            boundary, depth, _ = way
            seconds[edge] = self._shared(depth, len(senders[way])).seconds(boundary_bytes[boundary])
        return seconds

    def reduce_seconds(self, stage: int, size_bytes: float) -> float:
        """The seconds of the reduction of a stage's gradients in a ring of its replicas.

        Each of r replicas sends 2 (r - 1) parts of 1/r of the gradients (Patarasuk and Yuan 2009). The slowest of the
        links that the ring goes over decides.

        Args:
            stage: the stage's number.
            size_bytes: the bytes of its gradients.
        """
        workers = self._placement.workers[stage]
        if len(workers) == 1:
            return 0.0
        message = size_bytes / len(workers)
        levels = [self._shared(depth, self._rings(workers, depth)) for depth in range(1, self._depth(workers) + 1)]
        return 2 * (len(workers) - 1) * max(level.seconds(message) for level in levels)

    def slowest_rate(self, workers: Sequence[int]) -> float:
        """The bytes a second of the slowest link between some workers, of which there are at least two."""
        return min(level.bytes_per_second for level in self._cluster.levels[: self._depth(workers)])

    def _rings(self, workers: Sequence[int], depth: int) -> int:
        """The number of reductions that leave the busiest of the parts that have these workers."""
        parts = {self._part(worker, depth) for worker in workers}
        leaving = dict.fromkeys(parts, 0)
        for group in self._placement.groups:
            touched = {self._part(worker, depth) for worker in group}
            for part in touched & parts if len(touched) > 1 else ():
                leaving[part] += 1
        # A device does one reduction after another.
        return max(*leaving.values(), 1) if depth > 1 else 1

    def _depth(self, workers: Sequence[int]) -> int:
        """The number of the innermost level, from 1, that connects these workers; 0 for a worker and itself."""
        depth = 0
        while len({self._part(worker, depth + 1) for worker in workers}) > 1:
            depth += 1
        return depth

    def _part(self, worker: int, depth: int) -> int:
        """The number of the part of level `depth` that has a worker. The parts of level 1 are devices."""
        return worker // self._cluster.devices_in(depth - 1)

    def _shared(self, depth: int, flows: int) -> Level:
        """The link of a level for each of the flows that share it."""
        level = self._cluster.levels[depth - 1]
        return replace(level, bytes_per_second=level.bytes_per_second / flows)
