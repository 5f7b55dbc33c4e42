"""The costs of a stage with replicas: the terms of PipeDream's recurrence (`hierarchical.py`), for three objectives.

* The published one: seconds per mini-batch in the steady state of asynchronous training, to the letter. Its all-reduce
  takes 2 (m-1) |w| / B and is divided by m like the computation, as if every mini-batch were followed by one; and one
  link carries all that crosses a cut.
* The steady state with a ring: m replicas that finish m mini-batches reduce once, and a ring moves 2 (m-1)/m |w|
  through every link (Patarasuk and Yuan 2009). On an outer level this is divided by the devices of a part, each of
  which does a mini-batch between two reductions; that is exact where a stage is data parallel inside of its parts, and
  too little where it is a pipeline there. Each replica has a link of its own for what enters and leaves its stage. The
  authors' public optimizer counts both in this way.
* A synchronous step of M micro-batches: one micro-batch goes through all layers, the stage with the most left does the
  rest, and its gradients are reduced at the end. With t seconds a micro-batch, r replicas and G seconds for the
  gradients that is sum of t over all layers + max over stages of ((ceil(M/r) - 1) t + G). For K equal stages without
  replicas it is (M + K - 1) t: M t and the bubble, a share of (K-1)/M. A micro-batch's own way over the cuts is not
  counted once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import Cluster

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class LayerCosts:
    """The costs of each of the L layers; L entries in each list.

    Attributes:
        seconds: forward and backward of one mini-batch on one device; in a synchronous step of one micro-batch.
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

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class MemoryCosts:
    """The memory of a device, and the memory that each layer needs.

    A stage holds its weights, their gradients and the optimizer's state, and for each micro-batch in flight what its
    graph keeps. Of a stage with r replicas 1 + ceil(devices behind it / r) micro-batches are in flight on each replica,
    PipeDream's number for 1F1B; of a synchronous step at most ceil(M/r). In asynchronous training each of them has a
    version of the weights.

    Attributes:
        limit_bytes: of a device.
        activation_bytes: per layer, what the graph of one micro-batch keeps.
        optimizer_bytes: per layer, the optimizer's state.
        zero: whether the optimizer's state is divided over the replicas of a stage (ZeRO-1).
        recompute_seconds: per layer, of a forward. If given, a stage that does not fit otherwise keeps only what enters
            it for each micro-batch in flight, and one graph; it pays these seconds. None: nothing is recomputed.
    """

    limit_bytes: float
    activation_bytes: Sequence[float]
    optimizer_bytes: Sequence[float]
    zero: bool = False
    recompute_seconds: Sequence[float] | None = None


@dataclass(frozen=True)
class Objective:
    """The value to minimise; the module's comment has the formulas.

    Attributes:
        num_micro_batches: M of a synchronous step; None: mini-batches follow each other without end.
        published: the formula of the paper, to the letter.
    """

    num_micro_batches: int | None = None
    published: bool = False

    def __post_init__(self) -> None:
        if self.num_micro_batches is not None and self.num_micro_batches < 1:
            raise PartitionError(f"num_micro_batches is {self.num_micro_batches}; use at least 1.")
        if self.num_micro_batches is not None and self.published:
            raise PartitionError(
                "the published formula is for asynchronous training, which has no num_micro_batches; leave one of "
                "the two out."
            )


class Pricing:
    """The terms of one problem, as arrays (L+1, L+1): the entry (i, j) is for layers i to j-1, infinite for j <= i."""

    def __init__(self, layers: LayerCosts, cluster: Cluster, objective: Objective, memory: MemoryCosts | None) -> None:
        self.num_layers = len(layers)
        self.cluster = cluster
        self.objective = objective
        self.memory = memory
        if memory is not None:
            _check_memory(memory, self.num_layers)
        self.total_seconds = float(sum(layers.seconds))
        self._exists = np.triu(np.ones((self.num_layers + 1, self.num_layers + 1), dtype=bool), 1)
        self._seconds = _ranges(layers.seconds)
        self._weights = _ranges(layers.weight_bytes)
        # The entry i is what crosses before layer i: nothing before the first and after the last.
        self._crossing = np.array([0.0, *layers.crossing_bytes[:-1], 0.0])
        if memory is not None:
            self._activations = _ranges(memory.activation_bytes)
            self._optimizer = _ranges(memory.optimizer_bytes)
            again = memory.recompute_seconds
            self._again = None if again is None else _ranges(again)

    def relevant(self, copies: int, behind: int) -> tuple[int, int]:
        """The two with 1 and 0 where the costs do not depend on them, so that equal tables are found again."""
        by_copies = self.objective.num_micro_batches is not None or (self.memory is not None and self.memory.zero)
        return copies if by_copies else 1, behind if self.memory is not None else 0

    @property
    def nothing(self) -> Array:
        """No stage is possible: infinite everywhere."""
        return np.full(self._exists.shape, np.inf)

    def device(self, replicas: int, behind: int) -> Array:
        """A^0: the seconds of a device with layers i to j-1; infinite where they do not fit.

        Args:
            replicas: of the stage, on all levels.
            behind: devices with later stages, for each replica, rounded up.
        """
        seconds = np.where(self._exists, self._seconds, np.inf)
        if self.memory is not None:
            plain, recomputed = self._memory_bytes(replicas, behind)
            limit = self.memory.limit_bytes
            slower = seconds + self._again if self._again is not None else np.full_like(seconds, np.inf)
            seconds = np.where(plain <= limit, seconds, np.where(recomputed <= limit, slower, np.inf))
        return self._of_the_rest(seconds, replicas)

    def recomputes(self, start: int, stop: int, replicas: int, behind: int) -> bool:
        """Whether a stage fits only with recomputation."""
        if self.memory is None or self.memory.recompute_seconds is None:
            return False
        plain, recomputed = self._memory_bytes(replicas, behind)
        return bool(plain[start, stop] > self.memory.limit_bytes >= recomputed[start, stop])

    def stage(self, depth: int, replicas: int, copies: int, inner: Array) -> Array:
        """T^k with k = `depth`: a stage that is `inner` on each of its parts, with the time of its links.

        Args:
            replicas: the parts of this level that have the stage.
            copies: of the stage on all levels from this one on, which is at least `replicas`.
            inner: seconds inside of a part.
        """
        level = self.cluster.levels[depth - 1]
        messages = 2 * (replicas - 1)
        if self.objective.published:
            reduce = messages * self._weights / level.bytes_per_second + messages * level.latency_seconds
            return np.maximum(inner, reduce) / replicas
        reduce = messages * self._weights / (replicas * level.bytes_per_second) + messages * level.latency_seconds
        if self.objective.num_micro_batches is None:
            reduce /= self.cluster.devices_in(depth - 1)
        links = self._of_the_rest(self._cut_seconds(depth), copies)
        busiest = np.maximum(inner, np.maximum(links[:, None], links[None, :]))
        if self.objective.num_micro_batches is not None:
            return busiest + reduce
        return np.maximum(busiest, reduce) / replicas

    def cuts(self, depth: int) -> Array:
        """The seconds of a cut by itself, for the first layer after it: 2 a / B in the published formula, else 0."""
        return self._cut_seconds(depth) if self.objective.published else np.zeros(self.num_layers + 1)

    def total(self, value: float) -> float:
        """The predicted seconds, from the value of the slowest stage."""
        return value if self.objective.num_micro_batches is None else self.total_seconds + value

    def _cut_seconds(self, depth: int) -> Array:
        """A micro-batch and its gradient over one link, for the first layer after it; (L+1,)."""
        level = self.cluster.levels[depth - 1]
        seconds = 2 * (self._crossing / level.bytes_per_second + level.latency_seconds)
        seconds[[0, -1]] = 0.0
        return seconds

    def _of_the_rest(self, seconds: Array, replicas: int) -> Array:
        """Seconds of one micro-batch -> those of all that a replica does after its first one; unchanged without M."""
        if self.objective.num_micro_batches is None:
            return seconds
        rest = ceil(self.objective.num_micro_batches / replicas) - 1
        return np.multiply(seconds, rest, where=np.isfinite(seconds), out=seconds.copy())

    def _memory_bytes(self, replicas: int, behind: int) -> tuple[Array, Array]:
        """Bytes that a device needs without and with recomputation."""
        assert self.memory is not None
        in_flight = 1 + behind
        versions = in_flight
        if self.objective.num_micro_batches is not None:
            in_flight = min(in_flight, ceil(self.objective.num_micro_batches / replicas))
            versions = 1
        shards = replicas if self.memory.zero else 1
        held = (versions + 1) * self._weights + self._optimizer / shards
        entering = self._crossing[:, None]
        return held + in_flight * self._activations, held + in_flight * entering + self._activations


def _ranges(values: Sequence[float]) -> Array:
    """Sums over layers i to j-1, as (L+1, L+1)."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    return sums[None, :] - sums[:, None]


def _check_memory(memory: MemoryCosts, num_layers: int) -> None:
    lists = {"activation_bytes": memory.activation_bytes, "optimizer_bytes": memory.optimizer_bytes}
    if memory.recompute_seconds is not None:
        lists["recompute_seconds"] = memory.recompute_seconds
    for name, values in lists.items():
        if len(values) != num_layers:
            raise PartitionError(f"{name} has {len(values)} entries for {num_layers} layers; give one entry per layer.")
