"""PipeDream's partitioner: layers -> stages with replicas on a cluster of several levels (SOSP 2019, section 3.1).

At level k a stage of layers i to j is replicated over m parts of that level, and inside of each part it is the best
pipeline of level k-1 on all of that part's devices:

    T^k(i..j, m) = 1/m max(A^{k-1}(i..j, all parts), 2 (m-1) sum |w| / B_k)            one stage
    A^k(i..j, m) = min over s, m' of max(T^k(i..s, m'), 2 a_s / B_k, A^k(s+1..j, m-m'))   the best pipeline

or T^k(i..j, m) where one stage is better. Where the number of stages is given it is one more index of T and A, and the
stages before and behind a cut have that many together. a_s are the bytes that cross after layer s, B_k the bandwidth of
level k, and A^0(i..j) the seconds of the layers. The paper takes the last stage off; here it is the first one, which
gives the same minimum, and the devices behind a stage, on which its memory depends, are known.

Three objectives share this recurrence and differ in the costs of a stage (`pricing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import Cluster
from pipedream.pricing import Array, LayerCosts, MemoryCosts, Objective, Pricing


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


@dataclass(frozen=True)
class PlacedStage:
    """A stage of the pipeline that runs.

    Attributes:
        layers: its layers.
        ranks: its replicas; micro-batch m runs on `ranks[m % len(ranks)]`. Where a pipeline is replicated over parts of
            the cluster, this order keeps each micro-batch in one part.
        recompute: whether its memory suffices only with recomputation.
    """

    layers: range
    ranks: tuple[int, ...]
    recompute: bool = False

    @property
    def replicas(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class ClusterPlan:
    """The pipeline that the partitioner has chosen.

    Attributes:
        parts: the stages of the outermost level, with what is inside of them.
        stages: the stages of the pipeline, from the first layer to the last.
        seconds: predicted: of a mini-batch in the steady state, or of a step of `num_micro_batches`.
    """

    parts: tuple[Part, ...]
    stages: tuple[PlacedStage, ...]
    seconds: float

    @property
    def replication(self) -> str:
        """The number of workers of each stage, such as 15-1."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def partition_cluster(
    layers: LayerCosts,
    cluster: Cluster,
    objective: Objective,
    memory: MemoryCosts | None = None,
    *,
    one_stage: bool = True,
    num_stages: int | None = None,
) -> ClusterPlan:
    """The stages with the least predicted seconds on all devices of a cluster.

    The time is O(L^2 m^2) for the outermost level of m parts and O(L^3 m^2) for the others; under a memory limit or
    with micro-batches the inner levels are solved several times. With K stages given, an outermost level that is the
    only one takes K times as long, and others up to K^2 times.

    Args:
        layers: the costs of the L layers.
        cluster: the devices; all of them are used.
        objective: what is minimised.
        memory: the memory of a device and what needs it; None: no limit.
        one_stage: whether a single stage on the outermost level (data parallelism over its parts) is allowed.
        num_stages: K; None: as many as are best.

    Raises:
        PartitionError: no pipeline on these devices fits the memory, or the layers are too few for what is asked.
    """
    unlimited = None
    if memory is not None:
        # Often the best pipeline without a limit fits, and it is found much sooner.
        unlimited = partition_cluster(layers, cluster, objective, one_stage=one_stage, num_stages=num_stages)
    return _best(_Search(Pricing(layers, cluster, objective, memory)), unlimited, num_stages, one_stage)


def partitions_by_stages(
    layers: LayerCosts, cluster: Cluster, objective: Objective, memory: MemoryCosts | None = None
) -> Iterator[ClusterPlan]:
    """`partition_cluster` for K = 1, 2, ... stages, which share their tables; a K that does not fit is left out."""
    free = _Search(Pricing(layers, cluster, objective, None))
    limited = free if memory is None else _Search(Pricing(layers, cluster, objective, memory))
    for num_stages in range(1, min(len(layers), cluster.num_devices) + 1):
        try:
            unlimited = None if memory is None else _best(free, None, num_stages)
            yield _best(limited, unlimited, num_stages)
        except PartitionError:
            continue


def _best(
    search: _Search, unlimited: ClusterPlan | None, num_stages: int | None, one_stage: bool = True
) -> ClusterPlan:
    """The best pipeline of a search, which is the one that was found without a limit of memory if it fits."""
    pricing = search.pricing
    cluster, memory, num_layers = pricing.cluster, pricing.memory, pricing.num_layers
    if unlimited is not None:
        plan = _plan(pricing, unlimited.parts)
        if plan.seconds <= unlimited.seconds:
            return plan
    top, parts = len(cluster.levels), cluster.levels[-1].parts
    value, stages = search.pipeline(top, 0, num_layers, parts, 1, 0, num_stages, one_stage)
    if value == np.inf:
        limit = "" if memory is None else f" with {memory.limit_bytes / 2**30:.4g} GiB each"
        into = "" if num_stages is None else f" in {num_stages} stages"
        raise PartitionError(
            f"no pipeline of {num_layers} layers{into} fits the {cluster.num_devices} devices of a {cluster} cluster"
            f"{limit}; allow more memory or recomputation, or use more devices or smaller micro-batches."
        )
    return _plan(pricing, stages)


def flat(cluster: Cluster) -> Cluster:
    """The same devices as one level whose links are the slowest of all, so that stages may take any of them."""
    slowest = min(cluster.levels, key=lambda level: level.bytes_per_second)
    return Cluster((replace(slowest, parts=cluster.num_devices),))


def plan_of(
    parts: tuple[Part, ...],
    layers: LayerCosts,
    cluster: Cluster,
    objective: Objective,
    memory: MemoryCosts | None = None,
) -> ClusterPlan:
    """A given configuration, priced; its seconds are infinite where it does not fit the memory."""
    return _plan(Pricing(layers, cluster, objective, memory), parts)


def data_parallel(num_layers: int, cluster: Cluster) -> tuple[Part, ...]:
    """One stage that every device has."""
    parts: tuple[Part, ...] = ()
    for level in cluster.levels:
        parts = (Part(0, num_layers, level.parts, parts),)
    return parts


def communicated_bytes(
    stages: Sequence[PlacedStage], layers: LayerCosts, num_micro_batches: int | None = None
) -> tuple[float, float]:
    """Bytes that all devices together send: of gradients' all-reduces, and of what crosses the cuts, both ways.

    They are those of a step of `num_micro_batches`, or without it of one mini-batch in the steady state, where r
    replicas reduce once for r mini-batches. A ring moves 2 (r-1) |w| in all.
    """
    reduced = crossing = 0.0
    for stage in stages:
        weights = sum(layers.weight_bytes[stage.layers.start : stage.layers.stop])
        reduced += 2 * (stage.replicas - 1) * weights / (stage.replicas if num_micro_batches is None else 1)
        if stage.layers.start > 0:
            crossing += 2 * layers.crossing_bytes[stage.layers.start - 1] * (num_micro_batches or 1)
    return reduced, crossing


class _Search:
    """The tables of one problem. The entry (i, j) of an array is for layers i to j-1, and infinite for j <= i.

    `count` is everywhere the number of stages that devices hold, or None for any number.
    """

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.levels = pricing.cluster.levels
        self._kept_stages: dict[tuple[int, int, int, int, int | None], Array] = {}
        self._kept_tables: dict[tuple[int, int, int, int, int | None, int | None], Array] = {}

    def stage(self, depth: int, replicas: int, copies: int, behind: int, count: int | None) -> Array:
        """T of level `depth`.

        Args:
            copies: of the pipeline that the stage belongs to, through replication on outer levels.
            behind: devices with later stages, for each copy of that pipeline.
            count: of the stages inside of it.
        """
        copies, behind = self.pricing.relevant(copies, behind)
        inside = copies * replicas, _share(behind, replicas)
        key = (depth, replicas, *inside, count)
        if key not in self._kept_stages:
            if depth > 1:
                inner = self.table(depth - 1, self.levels[depth - 2].parts, *inside, count)
            elif count in (None, 1):
                inner = self.pricing.device(*inside)
            else:
                inner = self.pricing.nothing
            self._kept_stages[key] = self.pricing.stage(depth, replicas, copies * replicas, inner)
        return self._kept_stages[key]

    def table(
        self, depth: int, parts: int, copies: int, behind: int, count: int | None, stop: int | None = None
    ) -> Array:
        """A of level `depth` on the given number of its parts: (L+1, L+1), or (L+1, 1) for one `stop` alone."""
        copies, behind = self.pricing.relevant(copies, behind)
        key = (depth, parts, copies, behind, count, stop)
        if key not in self._kept_tables:
            best = self.stage(depth, parts, copies, behind, count)[:, _column(stop)].copy()
            for replicas, first, rest in self.splits(depth, parts, count):
                through = self.split(depth, replicas, parts, copies, behind, first, rest, stop)
                np.minimum(best, _least_over_cuts(*through), out=best)
            self._kept_tables[key] = best
        return self._kept_tables[key]

    def splits(self, depth: int, parts: int, count: int | None) -> Iterator[tuple[int, int | None, int | None]]:
        """The replicas of a first stage, with the numbers of stages inside of it and in the rest of the pipeline."""
        for replicas in range(1, parts):
            if count is None:
                yield replicas, None, None
                continue
            size = self.pricing.cluster.devices_in(depth - 1)
            for first in range(1, min(count - 1, size) + 1):
                if count - first <= (parts - replicas) * size:
                    yield replicas, first, count - first

    def split(
        self,
        depth: int,
        replicas: int,
        parts: int,
        copies: int,
        behind: int,
        first: int | None,
        rest: int | None,
        stop: int | None,
    ) -> tuple[Array, Array]:
        """A first stage with `replicas` of the parts, (i, s), and the cut and the rest of the pipeline, (s, j)."""
        later = behind + (parts - replicas) * self.pricing.cluster.devices_in(depth - 1)
        others = self.table(depth, parts - replicas, copies, behind, rest, stop)
        own = self.stage(depth, replicas, copies, later, first)
        return own, np.maximum(self.pricing.cuts(depth)[:, None], others)

    def pipeline(
        self,
        depth: int,
        start: int,
        stop: int,
        parts: int,
        copies: int,
        behind: int,
        count: int | None,
        one_stage: bool = True,
    ) -> tuple[float, tuple[Part, ...]]:
        """The seconds of the best pipeline of layers `start` to `stop` - 1, and its stages.

        Of equal pipelines it has the fewest replicas, then the fewest layers, in its first stage; one stage goes first.
        """
        value = np.inf
        choice: tuple[int, int, int | None, int | None] | None = None
        if one_stage:
            value = float(self.stage(depth, parts, copies, behind, count)[start, stop])
            choice = (parts, stop, count, None)
        for replicas, inside, rest in self.splits(depth, parts, count):
            first, others = self.split(depth, replicas, parts, copies, behind, inside, rest, stop)
            through = np.maximum(first[start], others[:, 0])
            cut = int(through.argmin())
            if through[cut] < value:
                value, choice = float(through[cut]), (replicas, cut, inside, rest)
        if value == np.inf or choice is None:
            return np.inf, ()
        replicas, cut, inside, rest = choice
        later = behind + (parts - replicas) * self.pricing.cluster.devices_in(depth - 1)
        inner: tuple[Part, ...] = ()
        if depth > 1:
            own = copies * replicas, _share(later, replicas)
            _, inner = self.pipeline(depth - 1, start, cut, self.levels[depth - 2].parts, *own, inside)
        part = Part(start, cut, replicas, inner)
        if cut == stop:
            return value, (part,)
        return value, (part, *self.pipeline(depth, cut, stop, parts - replicas, copies, behind, rest)[1])


def _share(devices: int, replicas: int) -> int:
    """Devices behind one of several replicas, rounded up: that is how they are counted in the end, and a share of a
    rounded number, rounded up, is that of the number itself."""
    return -(-devices // replicas)


def _column(stop: int | None) -> slice:
    return slice(None) if stop is None else slice(stop, stop + 1)


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


def _price(pricing: Pricing, depth: int, parts: tuple[Part, ...], copies: int, behind: int) -> float:
    """The value of a pipeline that is given."""
    worst = 0.0
    later = behind
    for part in reversed(parts):
        inside = copies * part.replicas, _share(later, part.replicas)
        if depth == 1:
            inner = pricing.device(*inside)
        else:
            inner = np.full_like(pricing.device(1, 0), _price(pricing, depth - 1, part.inner, *inside))
        own = float(pricing.stage(depth, part.replicas, inside[0], inner)[part.start, part.stop])
        cut = float(pricing.cuts(depth)[part.start]) if part is not parts[0] else 0.0
        worst = max(worst, own, cut)
        later += part.replicas * pricing.cluster.devices_in(depth - 1)
    return worst


def _stages(pricing: Pricing, depth: int, parts: tuple[Part, ...], copies: int, behind: int) -> list[PlacedStage]:
    """The stages of a pipeline, whose ranks are counted from its own first device."""
    size = pricing.cluster.devices_in(depth - 1)
    used = sum(part.replicas for part in parts) * size
    stages, first = [], 0
    for part in parts:
        later = behind + used - first - part.replicas * size
        inside = copies * part.replicas, _share(later, part.replicas)
        if depth == 1:
            again = pricing.recomputes(part.start, part.stop, *inside)
            inner = [PlacedStage(range(part.start, part.stop), (0,), again)]
        else:
            inner = _stages(pricing, depth - 1, part.inner, *inside)
        for stage in inner:
            # Micro-batches go around the parts first, so that each stays in one part.
            ranks = tuple(
                first + part_index * size + rank for rank in stage.ranks for part_index in range(part.replicas)
            )
            stages.append(replace(stage, ranks=ranks))
        first += part.replicas * size
    return stages


def _plan(pricing: Pricing, parts: tuple[Part, ...]) -> ClusterPlan:
    top = len(pricing.cluster.levels)
    value = _price(pricing, top, parts, 1, 0)
    stages = _stages(pricing, top, parts, 1, 0)
    return ClusterPlan(parts, tuple(stages), pricing.total(value))
