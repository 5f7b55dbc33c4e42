"""The meshes that are worth simulating: numbers of stages and replicas, and the order of the processes.

A few processes can be shared out among stages in few ways, and all of them are tried. For more processes PipeDream's
dynamic programme (partition/hierarchical.py) finds the best ones for each number of stages; the meshes with equally
many replicas of all stages are tried besides.

Each mesh has a lower bound on its step, so that most of them need no simulation. With f and b the seconds of a
micro-batch's forward and backward, a stage of the layers i to j-1 with r replicas takes at least

    f(0..i) + ceil(M/r) (f + b)(i..j) + max(b(0..i), G(i..j) + U(i..j))

for its first micro-batch comes through all layers before it, its busiest replica runs ceil(M/r) of them, and after the
last one either that micro-batch goes back through the layers before, or the stage's gradients are reduced and its
weights updated. The slowest stage of the best split of the layers is the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise

import numpy as np

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.partition.hierarchical import partition_cluster, partitions_by_stages
from hf_gpipe.partition.pricing import Array, LayerCosts, MemoryCosts, Objective
from hf_gpipe.planner.costs import InnerRecompute
from hf_gpipe.planner.limits import limit_of, limits_of, speeds_of
from hf_gpipe.planner.network import Network, one_level
from hf_gpipe.planner.orders import kinds_of, orders
from hf_gpipe.planner.plan import Planner
from hf_gpipe.recipe import AUTO, PipelineConfig
from hf_gpipe.schedule import Placement, placement_for

#: Up to so many processes every way to share them out among stages is tried.
_FEW_PROCESSES = 6
#: Schedules whose stages have done all their work when the last micro-batch goes back.
_WHOLE_BACKWARDS = ("naive", "gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b")
#: Numbers of micro-batches for which the dynamic programme is asked.
_NUM_ASKED = 3


@dataclass(frozen=True)
class Mesh:
    """Stages, replicas and processes of a pipeline.

    Attributes:
        num_stages: K.
        replicas: of every stage, or of each.
        placement: the text of the processes of each stage; None: the usual order.
        workers: the processes of each stage.
    """

    num_stages: int
    replicas: int | tuple[int, ...]
    placement: str | None
    workers: Placement

    @classmethod
    def of(cls, placement: Placement) -> Mesh:
        """The mesh of a placement."""
        counts = placement.replicas
        replicas = counts[0] if len(set(counts)) == 1 else counts
        usual = placement_for("gpipe", len(counts), placement.num_processes, replicas)
        return cls(len(counts), replicas, None if placement == usual else str(placement), placement)

    def configure(self, config: PipelineConfig, num_micro_batches: int) -> PipelineConfig:
        """The configuration with this mesh. ZeRO-1 needs replicas: without them its `zero` is 0."""
        return replace(
            config,
            num_stages=self.num_stages,
            replicas=self.replicas,
            placement=self.placement,
            num_micro_batches=num_micro_batches,
            zero=config.zero if self.workers.has_replicas else 0,
        )


def meshes(planner: Planner, config: PipelineConfig, counts: Sequence[int]) -> list[tuple[float, PipelineConfig]]:
    """Configurations with their mesh and M decided, and lower bounds on their steps in seconds, the lowest first.

    Args:
        planner: of the model.
        config: `num_stages` or `replicas` are "auto", and the number of processes is known.
        counts: the numbers of micro-batches to try.

    Raises:
        UserError: no mesh has the stages and replicas that are asked for on this number of processes, or a mini-batch
            has too few rows for their replicas.
    """
    kinds = kinds_of(planner.memory_bytes, planner.speeds, config.processes)
    every = dict.fromkeys(
        Mesh.of(one) for mesh in dict.fromkeys(_meshes(planner, config, counts)) for one in orders(mesh.workers, kinds)
    )
    if not every:
        raise UserError(
            f"no mesh of {config.processes} processes has num_stages={config.num_stages} and replicas="
            f"{config.replicas} for a model of {planner.num_layers} layers; use another number of processes, or let "
            "both be auto."
        )
    steps = {count: planner.micro_batches_of_step(count) for count in counts}
    busy = [(mesh, count) for mesh in every for count in counts if steps[count] >= max(mesh.workers.replicas)]
    if not busy:
        fewest = min(max(mesh.workers.replicas) for mesh in every)
        raise UserError(too_few_rows(max(steps.values()), fewest))
    costs = {count: _StepCosts(planner, config, count) for count in counts}
    feasible = [(mesh, count) for mesh, count in busy if costs[count].may_fit(mesh)]
    bounds = [(costs[count].least_seconds(mesh), mesh, count) for mesh, count in feasible or busy]
    bounds.sort(key=lambda one: one[0])
    return [(bound, mesh.configure(config, count)) for bound, mesh, count in bounds]


def too_few_rows(num_micro_batches: int, replicas: int) -> str:
    """The message where a step can have fewer micro-batches than a stage has replicas."""
    return (
        f"a step has at most {num_micro_batches} micro-batches and a stage has {replicas} replicas, which take them in "
        "turn: some would never get one; use more micro-batches, more rows in a mini-batch, or fewer replicas."
    )


def _meshes(planner: Planner, config: PipelineConfig, counts: Sequence[int]) -> Iterator[Mesh]:
    """Every mesh to try, perhaps several times."""
    processes, most = config.processes, planner.num_layers
    yield from _even(planner, config)
    if config.replicas != AUTO:
        return
    asked = [config.num_stages] if isinstance(config.num_stages, int) else range(1, most + 1)
    if processes <= _FEW_PROCESSES:
        for num_stages in asked:
            for cuts in combinations(range(1, processes), num_stages - 1):
                shares = [stop - start for start, stop in pairwise((0, *cuts, processes))]
                if len(set(shares)) > 1:
                    yield Mesh.of(_consecutive(shares))
    clusters = [one_level(planner.device, processes)] if planner.cluster is None else [planner.cluster]
    if len(clusters[0].levels) > 1:
        clusters.append(clusters[0].flat())
    elif processes <= _FEW_PROCESSES:
        return
    for cluster in clusters:
        for placement in _programmed(planner, config, cluster, counts):
            mesh = Mesh.of(placement)
            if mesh.num_stages in asked and not (isinstance(mesh.replicas, int) and _is_alike(planner)):
                yield mesh


def _even(planner: Planner, config: PipelineConfig) -> Iterator[Mesh]:
    """The meshes whose stages have equally many replicas: D pipelines side by side, with one or two stages a process,
    and where it matters the same with the replicas of a stage side by side."""
    processes = config.processes
    for replicas in range(1, processes + 1):
        of_pipeline = processes // replicas
        if processes % replicas or config.replicas not in (AUTO, replicas):
            continue
        wanted = (of_pipeline, 2 * of_pipeline) if config.num_stages == AUTO else (config.num_stages,)
        for num_stages in wanted:
            if not isinstance(num_stages, int) or not of_pipeline <= num_stages <= planner.num_layers:
                continue
            yield Mesh.of(placement_for("gpipe", num_stages, processes, replicas))
            if num_stages == of_pipeline and 1 < replicas < processes and not _is_alike(planner):
                yield Mesh.of(_consecutive([replicas] * num_stages))


def _is_alike(planner: Planner) -> bool:
    """Whether all processes and their links are alike, so that their order does not matter."""
    has_levels = planner.cluster is not None and len(planner.cluster.levels) > 1
    return not has_levels and planner.speeds is None and not isinstance(planner.memory_bytes, tuple)


def _consecutive(shares: Sequence[int]) -> Placement:
    """So many replicas of each stage, on consecutive processes."""
    ends = list(accumulate(shares, initial=0))
    return Placement([range(start, stop) for start, stop in pairwise(ends)])


def _programmed(
    planner: Planner, config: PipelineConfig, cluster: Cluster, counts: Sequence[int]
) -> Iterator[Placement]:
    """The placements that the dynamic programme finds for each number of stages, with and without the limit of memory,
    for the numbers of micro-batches that are best where the number of stages is free."""
    problems = []
    for count in counts:
        layers, memory = _priced(planner, config, count)
        objective = Objective(planner.micro_batches_of_step(count))
        problems.append((partition_cluster(layers, cluster, objective).seconds, count, layers, objective, memory))
    problems.sort(key=lambda one: one[:2])
    for _, _, layers, objective, memory in problems[:_NUM_ASKED]:
        for limit in dict.fromkeys([None, memory]):
            for plan in partitions_by_stages(layers, cluster, objective, limit):
                yield Placement([stage.ranks for stage in plan.stages])


def _priced(planner: Planner, config: PipelineConfig, count: int) -> tuple[LayerCosts, MemoryCosts | None]:
    """The layers as the dynamic programme knows them, for one of so many micro-batches."""
    sums, inner = planner.sums(count), _inner(config)
    layers = sums.costs.layers
    seconds = [sums.seconds(index, index + 1, inner) for index in range(len(layers))]
    trained = [sums.owned(index, index + 1).trainable_bytes for index in range(len(layers))]
    costs = LayerCosts(
        [one.of_micro_batch() for one in seconds], [*(one.input_bytes for one in layers[1:]), 0.0], trained
    )
    limits = [
        one for process in range(config.processes) if (one := limit_of(planner.memory_bytes, process)) is not None
    ]
    if not limits:
        return costs, None
    share = planner.inputs.state_share(sums.costs.dtype)
    graphs = [layer.graph(inner) for layer in layers]
    can_recompute = config.recompute in (AUTO, "stage")
    memory = MemoryCosts(
        min(limits) / (1 + planner.device.reserved_share),
        tuple(graph.saved_bytes + graph.saved_input_bytes for graph in graphs),
        tuple(share * size for size in trained),
        bool(config.zero),
        tuple(one.forward for one in seconds) if can_recompute else None,
    )
    return costs, memory


def _inner(config: PipelineConfig) -> InnerRecompute:
    return "block" if config.recompute == "block" else "none"


class _StepCosts:
    """Lower bounds of a step of M micro-batches; the entry (i, j) of an array is for the layers i to j-1."""

    def __init__(self, planner: Planner, config: PipelineConfig, count: int) -> None:
        self._planner, self._config = planner, config
        self._num_micro_batches = planner.micro_batches_of_step(count)
        sums, inner, num_layers = planner.sums(count), _inner(config), planner.num_layers
        self._num_layers = num_layers
        self._work = np.full((num_layers + 1, num_layers + 1), np.inf)
        self._again = np.zeros_like(self._work)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                seconds = sums.seconds(start, stop, inner)
                self._work[start, stop] = seconds.forward + seconds.backward
                self._again[start, stop] = seconds.forward_only
        before = [sums.seconds(0, start, inner) for start in range(1, num_layers + 1)]
        self._down = np.array([0.0, *(min(one.forward, one.forward_only) for one in before)])
        self._up = np.array([0.0, *(one.backward for one in before)])
        if config.schedule not in _WHOLE_BACKWARDS:
            # A stage may compute gradients of weights while the last micro-batch goes back through the layers before.
            self._up = np.zeros_like(self._up)
        own = [sums.owned(index, index + 1) for index in range(num_layers)]
        self._trained = _ranges([one.trainable_bytes for one in own])
        self._held = _ranges([one.num_bytes for one in own])
        self._update = _ranges([sums.update_seconds(index, index + 1, planner.inputs) for index in range(num_layers)])
        self._state_share = planner.inputs.state_share(sums.costs.dtype)
        self._fastest = max(planner.speeds or [1.0])

    def least_seconds(self, mesh: Mesh) -> float:
        """The bound of the module's comment."""
        placement, speeds = mesh.workers, speeds_of(self._planner.speeds, mesh.workers)
        if mesh.num_stages * max(placement.replicas) > placement.num_processes and len(set(placement.replicas)) == 1:
            # Several stages of a process share its time.
            rounds = -(-self._num_micro_batches // placement.replicas[0])
            of_pipeline = placement.num_processes // placement.replicas[0]
            return float(rounds * self._work[0, -1] / of_pipeline / self._fastest)
        network = Network(self._planner.cluster or one_level(self._planner.device, placement.num_processes), placement)
        before_seconds, after_seconds = self._down / self._fastest, self._up / self._fastest
        costs = []
        for stage, replicas in enumerate(placement.replicas):
            work = self._work.copy()
            if self._config.recompute == "stage" and stage < mesh.num_stages - 1:
                work += self._again
            rounds = -(-self._num_micro_batches // replicas)
            # For large gradients the bandwidth alone counts; so this is a lower bound for all.
            of_byte = network.reduce_seconds(stage, 1e15) / 1e15
            shards = replicas if self._config.zero else 1
            ending = of_byte * self._trained + self._update / shards / speeds[stage]
            through = before_seconds[:, None] + rounds * work / speeds[stage]
            costs.append(through + np.maximum(after_seconds[:, None], ending))
        return self._least(costs)

    def may_fit(self, mesh: Mesh) -> bool:
        """Whether weights, gradients and optimizer state alone fit some split."""
        placement = mesh.workers
        limits = limits_of(self._planner.memory_bytes, placement)
        needed = []
        for stage, (replicas, limit) in enumerate(zip(placement.replicas, limits, strict=True)):
            if limit is None:
                return True
            if any(len(placement.stages_of(process)) > 1 for process in placement.workers[stage]):
                return True
            state = self._state_share / (replicas if self._config.zero else 1)
            size = self._held + (1 + state) * self._trained
            needed.append(np.where(np.isfinite(self._work), size, np.inf) / limit)
        return self._least(needed) <= 1

    def _least(self, costs: Sequence[Array]) -> float:
        """The cost of the most expensive stage, in the best split."""
        rest = np.where(np.arange(self._num_layers + 1) == self._num_layers, 0.0, np.inf)
        for cost in reversed(costs):
            rest = np.maximum(cost, rest[None, :]).min(axis=1)
        return float(rest[0])


def _ranges(values: Sequence[float]) -> Array:
    """Sums over the layers i to j-1."""
    sums = np.array([0.0, *accumulate(values)])
    return sums[None, :] - sums[:, None]
