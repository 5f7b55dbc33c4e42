"""PipeDream's partitioner: layers -> stages with replicas on a cluster of several levels (SOSP 2019, section 3.1).

At level k a stage of layers i to j is replicated over m parts of that level, and inside of each part it is the best
pipeline of level k-1 on all of that part's devices:

    T^k(i..j, m) = 1/m max(A^{k-1}(i..j, all parts), 2 (m-1) sum |w| / B_k)            one stage
    A^k(i..j, m) = min over s, m' of max(T^k(i..s, m'), 2 a_s / B_k, A^k(s+1..j, m-m'))   the best pipeline

or T^k(i..j, m) where one stage is better. a_s are the bytes that cross after layer s, B_k the bandwidth of level k, and
A^0(i..j) the seconds of the layers. The paper takes the last stage off; here it is the first one, which gives the same
minimum. All seconds are those of a mini-batch in the steady state of asynchronous training, with one of two formulas:

* The published one, to the letter. Its all-reduce takes 2 (m-1) |w| / B and is divided by m like the computation, as if
  every mini-batch were followed by one; and one link carries all that crosses a cut.
* Rings: m replicas that finish m mini-batches reduce once, and a ring moves 2 (m-1)/m |w| through every link (Patarasuk
  and Yuan 2009). On an outer level this is divided by the devices of a part, each of which does a mini-batch between
  two reductions; that is exact where a stage is data parallel inside of its parts, and too little where it is a
  pipeline there. Each replica has a link of its own for what enters and leaves its stage. The authors' public optimizer
  counts both in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import Cluster

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LayerCosts:
    """The costs of each of the L layers; L entries in each list.

    Attributes:
        seconds: forward and backward of one mini-batch on one device.
        crossing_bytes: what crosses from a layer to the next for it. The same comes back as gradient. The last entry
            is not used.
        weight_bytes: of the parameters, which are also those of their gradients.
    """

    seconds: Sequence[float]
    crossing_bytes: Sequence[float]
    weight_bytes: Sequence[float]

    def __post_init__(self) -> None:
        lengths = [len(self.seconds), len(self.crossing_bytes), len(self.weight_bytes)]
        if len(set(lengths)) > 1 or not self.seconds:
            raise PartitionError(
                f"costs are given for {lengths[0]} layers (seconds), {lengths[1]} (crossing_bytes) and {lengths[2]} "
                "(weight_bytes); give one entry per layer in each."
            )


@dataclass(frozen=True)
class Part:
    """A stage of one level of the cluster.

    Attributes:
        start, stop: its layers.
        replicas: the parts of its level, each of which has the whole stage.
        inner: the pipeline inside of each part; empty on the innermost level, where a part is a device.
    """

    start: int
    stop: int
    replicas: int
    inner: tuple[Part, ...] = ()


class Stage(NamedTuple):
    """A stage of the pipeline that runs: its layers, and how many devices have it."""

    layers: range
    replicas: int


@dataclass(frozen=True)
class ClusterPlan:
    """A pipeline on a cluster.

    Attributes:
        parts: the stages of the outermost level, with what is inside of them.
        seconds: predicted, of a mini-batch.
    """

    parts: tuple[Part, ...]
    seconds: float

    @property
    def stages(self) -> list[Stage]:
        """From the first layer to the last."""
        return list(_stages(self.parts, 1))

    @property
    def replication(self) -> str:
        """The number of workers of each stage, such as 15-1."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def partition_cluster(
    layers: LayerCosts, cluster: Cluster, *, published: bool = False, one_stage: bool = True
) -> ClusterPlan:
    """The stages with the least predicted seconds on all devices of a cluster.

    The time is O(L^2 m^2) for the outermost level of m parts and O(L^3 m^2) for the others.

    Args:
        layers: the costs of the L layers.
        cluster: the devices; all of them are used.
        published: whether the published formula is minimised, and not that of rings.
        one_stage: whether a single stage on the outermost level (data parallelism over its parts) is allowed.

    Raises:
        PartitionError: the layers are too few for what is asked.
    """
    search = _Search(layers, cluster, published=published)
    top = len(cluster.levels)
    value, parts = search.pipeline(top, 0, len(layers.seconds), cluster.levels[-1].parts, one_stage)
    if value == np.inf:
        raise PartitionError(
            f"no pipeline of {len(layers.seconds)} layers has several stages on the {cluster.num_devices} devices of a "
            f"{cluster} cluster; allow one stage, or use more layers or devices."
        )
    return ClusterPlan(parts, search.price(top, parts))


def plan_of(parts: tuple[Part, ...], layers: LayerCosts, cluster: Cluster, *, published: bool = False) -> ClusterPlan:
    """A given configuration, priced."""
    return ClusterPlan(parts, _Search(layers, cluster, published=published).price(len(cluster.levels), parts))


def flat(cluster: Cluster) -> Cluster:
    """The same devices as one level whose links are the slowest of all, so that stages may take any of them."""
    slowest = min(cluster.levels, key=lambda level: level.bytes_per_second)
    return Cluster((replace(slowest, parts=cluster.num_devices),))


def data_parallel(num_layers: int, cluster: Cluster) -> tuple[Part, ...]:
    """One stage that every device has."""
    parts: tuple[Part, ...] = ()
    for level in cluster.levels:
        parts = (Part(0, num_layers, level.parts, parts),)
    return parts


def communicated_bytes(stages: Sequence[Stage], layers: LayerCosts) -> float:
    """Bytes that all devices together send for one mini-batch: of all-reduces, and of what crosses the cuts, both ways.

    r replicas reduce once for r mini-batches, and a ring moves 2 (r-1) |w| in all.
    """
    total = 0.0
    for own, replicas in stages:
        total += 2 * (replicas - 1) * sum(layers.weight_bytes[own.start : own.stop]) / replicas
        if own.start > 0:
            total += 2 * layers.crossing_bytes[own.start - 1]
    return total


class _Search:
    """The tables of one problem, (L+1, L+1): the entry (i, j) is for layers i to j-1, and infinite for j <= i."""

    def __init__(self, layers: LayerCosts, cluster: Cluster, *, published: bool) -> None:
        self._cluster, self._published = cluster, published
        self._weights = _ranges(layers.weight_bytes)
        exists = np.triu(np.ones(self._weights.shape, dtype=bool), 1)
        #: A^0: the seconds of a device with layers i to j-1.
        self._device = np.where(exists, _ranges(layers.seconds), np.inf)
        # The entry i is what crosses before layer i: nothing before the first and after the last.
        self._crossing = np.array([0.0, *layers.crossing_bytes[:-1], 0.0])
        self._kept_stages: dict[tuple[int, int], Array] = {}
        self._kept_tables: dict[tuple[int, int, int | None], Array] = {}

    def _of_level(self, depth: int, replicas: int, inner: Array) -> Array:
        """T of level `depth`: a stage that is `inner` on each of its parts, with the time of its links."""
        level = self._cluster.levels[depth - 1]
        messages = 2 * (replicas - 1)
        if self._published:
            reduce = messages * self._weights / level.bytes_per_second + messages * level.latency_seconds
            return np.maximum(inner, reduce) / replicas
        reduce = messages * self._weights / (replicas * level.bytes_per_second) + messages * level.latency_seconds
        reduce /= self._cluster.devices_in(depth - 1)
        links = self._cut_seconds(depth)
        return np.maximum(np.maximum(inner, np.maximum(links[:, None], links[None, :])), reduce) / replicas

    def _cut_seconds(self, depth: int) -> Array:
        """A micro-batch and its gradient over one link, for the first layer after it; (L+1,)."""
        level = self._cluster.levels[depth - 1]
        seconds = 2 * (self._crossing / level.bytes_per_second + level.latency_seconds)
        seconds[[0, -1]] = 0.0
        return seconds

    def _cuts(self, depth: int) -> Array:
        """The seconds of a cut by itself, for the first layer after it: 2 a / B in the published formula, else 0."""
        return self._cut_seconds(depth) if self._published else np.zeros_like(self._crossing)

    def _stage(self, depth: int, replicas: int) -> Array:
        """T of level `depth`."""
        if (depth, replicas) not in self._kept_stages:
            inner = self._table(depth - 1, self._cluster.levels[depth - 2].parts) if depth > 1 else self._device
            self._kept_stages[depth, replicas] = self._of_level(depth, replicas, inner)
        return self._kept_stages[depth, replicas]

    def _table(self, depth: int, parts: int, stop: int | None = None) -> Array:
        """A of level `depth` on the given number of its parts: (L+1, L+1), or (L+1, 1) for one `stop` alone."""
        if (depth, parts, stop) not in self._kept_tables:
            column = slice(None) if stop is None else slice(stop, stop + 1)
            best = self._stage(depth, parts)[:, column].copy()
            for replicas in range(1, parts):
                np.minimum(best, _least_over_cuts(*self._split(depth, replicas, parts, stop)), out=best)
            self._kept_tables[depth, parts, stop] = best
        return self._kept_tables[depth, parts, stop]

    def _split(self, depth: int, replicas: int, parts: int, stop: int | None) -> tuple[Array, Array]:
        """A first stage with `replicas` of the parts, (i, s), and the cut and the rest of the pipeline, (s, j)."""
        others = self._table(depth, parts - replicas, stop)
        return self._stage(depth, replicas), np.maximum(self._cuts(depth)[:, None], others)

    def pipeline(
        self, depth: int, start: int, stop: int, parts: int, one_stage: bool = True
    ) -> tuple[float, tuple[Part, ...]]:
        """The seconds of the best pipeline of layers `start` to `stop` - 1, and its stages.

        Of equal pipelines it has the fewest replicas, then the fewest layers, in its first stage; one stage goes first.
        """
        value, cut, replicas = float(self._stage(depth, parts)[start, stop]) if one_stage else np.inf, stop, parts
        for count in range(1, parts):
            first, others = self._split(depth, count, parts, stop)
            through = np.maximum(first[start], others[:, 0])
            place = int(through.argmin())
            if through[place] < value:
                value, cut, replicas = float(through[place]), place, count
        if value == np.inf:
            return np.inf, ()
        inner: tuple[Part, ...] = ()
        if depth > 1:
            _, inner = self.pipeline(depth - 1, start, cut, self._cluster.levels[depth - 2].parts)
        rest = () if cut == stop else self.pipeline(depth, cut, stop, parts - replicas)[1]
        return value, (Part(start, cut, replicas, inner), *rest)

    def price(self, depth: int, parts: tuple[Part, ...]) -> float:
        """The seconds of a pipeline that is given."""
        worst = 0.0
        for part in parts:
            inner = self._device
            if depth > 1:
                inner = np.full_like(inner, self.price(depth - 1, part.inner))
            own = float(self._of_level(depth, part.replicas, inner)[part.start, part.stop])
            cut = float(self._cuts(depth)[part.start]) if part is not parts[0] else 0.0
            worst = max(worst, own, cut)
        return worst


def _ranges(values: Sequence[float]) -> Array:
    """Sums over layers i to j-1, as (L+1, L+1)."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    return sums[None, :] - sums[:, None]


def _least_over_cuts(first: Array, rest: Array) -> Array:
    """min over s of max(first[i, s], rest[s, j])."""
    if rest.shape[1] == 1:
        return np.maximum(first, rest[:, 0]).min(axis=1)[:, None]
    size = len(first)
    least = np.full((size, size), np.inf)
    # A first stage ends after its start, and a rest after its own: only these entries can be finite.
    for start in range(size - 2):
        cuts = slice(start + 1, size - 1)
        least[start, start + 2 :] = np.maximum(first[start, cuts, None], rest[cuts, start + 2 :]).min(axis=0)
    return least


def _stages(parts: Sequence[Part], copies: int) -> Iterator[Stage]:
    for part in parts:
        if part.inner:
            yield from _stages(part.inner, copies * part.replicas)
        else:
            yield Stage(range(part.start, part.stop), copies * part.replicas)
