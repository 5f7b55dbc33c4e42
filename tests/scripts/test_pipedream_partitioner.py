"""PipeDream's partitioner against every possible pipeline on small clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.hierarchical import (
    Part,
    communicated_bytes,
    flat,
    partition_cluster,
    partitions_by_stages,
    plan_of,
)
from pipedream.pricing import LayerCosts, MemoryCosts, Objective

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import CLUSTERS, Cluster, Level

STEADY, PUBLISHED = Objective(), Objective(published=True)


def pipelines(cluster: Cluster, depth: int, start: int, stop: int) -> Iterator[tuple[Part, ...]]:
    """Every pipeline of the layers on all parts of a level, with every pipeline inside of each part."""
    num_parts = cluster.levels[depth - 1].parts
    for num_stages in range(1, min(stop - start, num_parts) + 1):
        for cuts in combinations(range(start + 1, stop), num_stages - 1):
            for shares in combinations(range(1, num_parts), num_stages - 1):
                ranges = list(pairwise((start, *cuts, stop)))
                replicas = [after - before for before, after in pairwise((0, *shares, num_parts))]
                yield from _with_inner(cluster, depth, ranges, replicas)


def _with_inner(
    cluster: Cluster, depth: int, ranges: list[tuple[int, int]], replicas: list[int]
) -> Iterator[tuple[Part, ...]]:
    if not ranges:
        yield ()
        return
    (start, stop), *others = ranges
    inners = [()] if depth == 1 else pipelines(cluster, depth - 1, start, stop)
    for inner in inners:
        for rest in _with_inner(cluster, depth, others, replicas[1:]):
            yield (Part(start, stop, replicas[0], inner), *rest)


def placed(parts: tuple[Part, ...], copies: int = 1) -> list[tuple[Part, int]]:
    """The stages that devices hold, in order, each with all its replicas."""
    found = []
    for part in parts:
        own = copies * part.replicas
        found += placed(part.inner, own) if part.inner else [(part, own)]
    return found


def in_flight(parts: tuple[Part, ...], objective: Objective) -> dict[int, int]:
    """Micro-batches in flight on a replica, by the stage's first layer."""
    stages = placed(parts)
    counts = {}
    for index, (stage, replicas) in enumerate(stages):
        counts[stage.start] = ceil(sum(others for _, others in stages[index:]) / replicas)
        if objective.num_micro_batches is not None:
            counts[stage.start] = min(counts[stage.start], ceil(objective.num_micro_batches / replicas))
    return counts


def seconds_of(
    parts: tuple[Part, ...], layers: LayerCosts, cluster: Cluster, objective: Objective, memory: MemoryCosts | None
) -> float:
    """The predicted seconds of one pipeline, from the definitions of pricing.py alone."""
    flight = in_flight(parts, objective)
    M = objective.num_micro_batches

    def weights(part: Part) -> float:
        return sum(layers.weight_bytes[part.start : part.stop])

    def entering(layer: int) -> float:
        return layers.crossing_bytes[layer - 1] if 0 < layer < len(layers) else 0.0

    def on_device(part: Part, replicas: int) -> float:
        seconds = sum(layers.seconds[part.start : part.stop])
        if memory is None:
            return seconds
        n = flight[part.start]
        graph = sum(memory.activation_bytes[part.start : part.stop])
        state = sum(memory.optimizer_bytes[part.start : part.stop]) / (replicas if memory.zero else 1)
        held = weights(part) * ((n if M is None else 1) + 1) + state
        if held + n * graph <= memory.limit_bytes:
            return seconds
        if memory.recompute_seconds is not None and held + n * entering(part.start) + graph <= memory.limit_bytes:
            return seconds + sum(memory.recompute_seconds[part.start : part.stop])
        return inf

    def link(level: Level, layer: int) -> float:
        return 2 * level.seconds(entering(layer)) if 0 < layer < len(layers) else 0.0

    def value(parts: tuple[Part, ...], depth: int, copies: int) -> float:
        level = cluster.levels[depth - 1]
        worst = 0.0
        for index, part in enumerate(parts):
            m, replicas = part.replicas, copies * part.replicas
            rounds = 1 if M is None else -(-M // replicas) - 1
            inner = value(part.inner, depth - 1, replicas) if depth > 1 else on_device(part, replicas)
            if depth == 1 and inner < inf:
                inner *= rounds
            reduce = 2 * (m - 1) * level.seconds(weights(part) / (1 if objective.published else m))
            if not objective.published and M is None:
                reduce /= cluster.devices_in(depth - 1)
            links = [link(level, part.start) * rounds, link(level, part.stop) * rounds]
            if objective.published:
                worst = max(worst, max(inner, reduce) / m, link(level, part.start) if index else 0.0)
            elif M is None:
                worst = max(worst, max(inner, reduce, *links) / m)
            else:
                worst = max(worst, max(inner, *links) + reduce)
        return worst

    return value(parts, len(cluster.levels), 1) + (0 if M is None else sum(layers.seconds))


numbers = st.integers(0, 9).map(float)


@st.composite
def problems(draw: st.DrawFn, limited: bool) -> tuple[LayerCosts, Cluster, Objective, MemoryCosts | None]:
    """Up to 6 layers on up to 6 devices in one or two levels; zeros and ties are common."""
    size = draw(st.integers(1, 6))

    def per_layer() -> list[float]:
        return draw(st.lists(numbers, min_size=size, max_size=size))

    counts = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6,), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]))
    bandwidths = [draw(st.sampled_from([0.25, 1.0, 4.0])) for _ in counts]
    latencies = [draw(st.sampled_from([0.0, 0.5])) for _ in counts]
    cluster = Cluster(tuple(Level(*level) for level in zip(counts, bandwidths, latencies, strict=True)))
    micro_batches = st.integers(1, 9).map(lambda M: Objective(num_micro_batches=M))
    objective = draw(st.one_of(st.sampled_from([STEADY, PUBLISHED]), micro_batches))
    memory = None
    if limited:
        again = per_layer() if draw(st.booleans()) else None
        memory = MemoryCosts(draw(st.integers(5, 90)), per_layer(), per_layer(), draw(st.booleans()), again)
    return LayerCosts(per_layer(), per_layer(), per_layer()), cluster, objective, memory


def compare(problem: tuple[LayerCosts, Cluster, Objective, MemoryCosts | None]) -> None:
    layers, cluster, _, _ = problem
    least: dict[int, float] = {}
    for parts in pipelines(cluster, len(cluster.levels), 0, len(layers)):
        count = len(placed(parts))
        least[count] = min(least.get(count, inf), seconds_of(parts, *problem))
    by_stages = {len(plan.stages): plan for plan in partitions_by_stages(*problem)}
    assert set(by_stages) == {count for count, seconds in least.items() if seconds < inf}
    for count, plan in by_stages.items():
        assert plan.seconds == pytest.approx(least[count], rel=1e-12, abs=1e-12)
        assert seconds_of(plan.parts, *problem) == pytest.approx(least[count], rel=1e-12, abs=1e-12)
    most, best = max(least), min(least.values())
    if least[most] < inf:
        assert partition_cluster(*problem, num_stages=most) == by_stages[most]
    if best == inf:
        with pytest.raises(PartitionError, match="no pipeline of"):
            partition_cluster(*problem)
        return
    plan = partition_cluster(*problem)
    assert plan.seconds == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert seconds_of(plan.parts, *problem) == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert [(stage.layers.start, stage.replicas) for stage in plan.stages] == [
        (part.start, replicas) for part, replicas in placed(plan.parts)
    ]
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(cluster.num_devices))
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(len(layers)))


@settings(deadline=None, max_examples=200)
@given(problems(limited=False))
def test_the_value_is_that_of_the_best_of_all_pipelines(problem) -> None:
    compare(problem)


@settings(deadline=None, max_examples=200)
@given(problems(limited=True))
def test_the_value_is_that_of_the_best_pipeline_that_fits(problem) -> None:
    compare(problem)


@settings(deadline=None, max_examples=50)
@given(problems(limited=True), st.data())
def test_a_given_pipeline_is_priced_by_the_definitions(problem, data) -> None:
    layers, cluster, _, _ = problem
    parts = data.draw(st.sampled_from(list(pipelines(cluster, len(cluster.levels), 0, len(layers)))))
    plan = plan_of(parts, *problem)
    assert plan.seconds == pytest.approx(seconds_of(parts, *problem), rel=1e-12, abs=1e-12)


def test_ranks_keep_a_micro_batch_in_its_machine() -> None:
    """2 machines of 3 devices, each with the pipeline 2-1: the two stages of a micro-batch are in one machine."""
    cluster = Cluster((Level(3, 1.0), Level(2, 1e-6)))
    inner = (Part(0, 1, 2), Part(1, 2, 1))
    layers = LayerCosts([2.0, 1.0], [0.0, 0.0], [0.0, 0.0])
    plan = plan_of((Part(0, 2, 2, inner),), layers, cluster, STEADY)
    assert [stage.ranks for stage in plan.stages] == [(0, 3, 1, 4), (2, 5)]
    assert plan.replication == "4-2"
    for micro_batch in range(8):
        machines = {stage.ranks[micro_batch % stage.replicas] // 3 for stage in plan.stages}
        assert machines == {micro_batch % 2}


def test_equal_stages_of_a_synchronous_step_have_gpipes_bubble() -> None:
    """(M + K - 1) t for K stages of t seconds, over D replicas (M/D + K - 1) t and the reduction."""
    layers = LayerCosts([1.0] * 4, [0.0] * 4, [3.0] * 4)
    straight = tuple(Part(layer, layer + 1, 1) for layer in range(4))
    plan = plan_of(straight, layers, Cluster((Level(4, 1.0),)), Objective(num_micro_batches=8))
    assert plan.seconds == 8 + 4 - 1
    replicated = tuple(Part(2 * stage, 2 * stage + 2, 2) for stage in range(2))
    plan = plan_of(replicated, layers, Cluster((Level(4, 1.0),)), Objective(num_micro_batches=8))
    assert plan.seconds == (8 / 2 + 2 - 1) * 2 + 2 * (2 - 1) / 2 * 6.0
    assert communicated_bytes(plan.stages, layers, 8) == (2 * 2 * 6.0, 0.0)


def test_memory_decides_between_stages_recomputation_and_zero() -> None:
    """Two devices, two equal layers of weights 10 and activations 8; a link so slow that one stage is faster."""
    layers = LayerCosts([1.0, 1.0], [5.0, 0.0], [10.0, 10.0])
    cluster, objective = Cluster((Level(2, 1.0),)), Objective(num_micro_batches=4)

    def replication(limit: float, zero: bool = False, again: bool = False) -> tuple[str, list[bool]]:
        memory = MemoryCosts(limit, [8.0, 8.0], [20.0, 20.0], zero, [0.5, 0.5] if again else None)
        plan = partition_cluster(layers, cluster, objective, memory)
        return plan.replication, [stage.recompute for stage in plan.stages]

    # One stage on both: weights, gradients and state 40 + 40, of which ZeRO-1 leaves 40 + 20, and one graph of 16.
    assert replication(96) == ("2", [False])
    assert replication(76, zero=True) == ("2", [False])
    # A stage of one layer: 20 + 20, and two graphs of 8 on the first; recomputed there none and one graph.
    assert replication(76) == ("1-1", [False, False])
    assert replication(56) == ("1-1", [False, False])
    assert replication(53, again=True) == ("1-1", [True, False])
    with pytest.raises(PartitionError, match="no pipeline of 2 layers fits the 2 devices"):
        replication(52)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Objective(num_micro_batches=0), "num_micro_batches is 0"),
        (lambda: Objective(num_micro_batches=2, published=True), "asynchronous"),
        (lambda: LayerCosts([1.0], [1.0, 2.0], [1.0]), "2 .crossing_bytes."),
        (lambda: LayerCosts([], [], []), "give one entry per layer"),
        (
            lambda: partition_cluster(
                LayerCosts([1.0], [0.0], [1.0]), Cluster((Level(1, 1.0),)), STEADY, MemoryCosts(1.0, [], [1.0])
            ),
            "activation_bytes has 0 entries",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        call()


def test_a_flat_cluster_has_the_slowest_links() -> None:
    assert flat(CLUSTERS["pipedream-a"]).levels == (Level(16, 1.25e9, 5e-5),)
