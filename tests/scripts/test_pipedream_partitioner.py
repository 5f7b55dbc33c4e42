"""PipeDream's partitioner against every possible pipeline on small clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.partitioner import LayerCosts, Part, communicated_bytes, flat, partition_cluster, plan_of

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import CLUSTERS, Cluster, Level


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


def seconds_of(parts: tuple[Part, ...], layers: LayerCosts, cluster: Cluster, published: bool) -> float:
    """The predicted seconds of one pipeline, from the definitions of partitioner.py alone."""

    def link(level: Level, layer: int) -> float:
        return 2 * level.seconds(layers.crossing_bytes[layer - 1]) if 0 < layer < len(layers.seconds) else 0.0

    def value(parts: tuple[Part, ...], depth: int) -> float:
        level = cluster.levels[depth - 1]
        worst = 0.0
        for index, part in enumerate(parts):
            m, own = part.replicas, slice(part.start, part.stop)
            inner = value(part.inner, depth - 1) if depth > 1 else sum(layers.seconds[own])
            reduce = 2 * (m - 1) * level.seconds(sum(layers.weight_bytes[own]) / (1 if published else m))
            links = link(level, part.start), link(level, part.stop)
            if published:
                worst = max(worst, max(inner, reduce) / m, links[0] if index else 0.0)
            else:
                worst = max(worst, max(inner, reduce / cluster.devices_in(depth - 1), *links) / m)
        return worst

    return value(parts, len(cluster.levels))


numbers = st.integers(0, 9).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[LayerCosts, Cluster]:
    """Up to 6 layers on up to 6 devices in one or two levels; zeros and ties are common."""
    size = draw(st.integers(1, 6))
    costs = [draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(3)]
    counts = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6,), (2, 2), (3, 2), (2, 3), (1, 3), (3, 1)]))
    bandwidths = [draw(st.sampled_from([0.25, 1.0, 4.0])) for _ in counts]
    latencies = [draw(st.sampled_from([0.0, 0.5])) for _ in counts]
    cluster = Cluster(tuple(Level(*level) for level in zip(counts, bandwidths, latencies, strict=True)))
    return LayerCosts(*costs), cluster


@settings(deadline=None, max_examples=200)
@given(problems(), st.booleans(), st.data())
def test_the_value_is_that_of_the_best_of_all_pipelines(problem, published, data) -> None:
    layers, cluster = problem
    every = list(pipelines(cluster, len(cluster.levels), 0, len(layers.seconds)))
    best = min(seconds_of(parts, *problem, published) for parts in every)
    plan = partition_cluster(*problem, published=published)
    assert plan.seconds == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert seconds_of(plan.parts, *problem, published) == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert [(stage.layers.start, stage.replicas) for stage in plan.stages] == [
        (part.start, replicas) for part, replicas in placed(plan.parts)
    ]
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(len(layers.seconds)))
    # Several stages on the outermost level, where there can be some.
    several = [seconds_of(parts, *problem, published) for parts in every if len(parts) > 1]
    if several:
        other = partition_cluster(*problem, published=published, one_stage=False)
        assert other.seconds == pytest.approx(min(several), rel=1e-12, abs=1e-12)
    else:
        with pytest.raises(PartitionError, match="has several stages"):
            partition_cluster(*problem, published=published, one_stage=False)
    given_parts = data.draw(st.sampled_from(every))
    priced = plan_of(given_parts, *problem, published=published)
    assert priced.seconds == pytest.approx(seconds_of(given_parts, *problem, published), rel=1e-12, abs=1e-12)


def test_stages_of_a_replicated_pipeline_have_its_replicas() -> None:
    """2 machines of 3 devices, each with the pipeline 2-1."""
    cluster = Cluster((Level(3, 1.0), Level(2, 1e-6)))
    layers = LayerCosts([2.0, 1.0], [5.0, 0.0], [1.0, 3.0])
    plan = plan_of((Part(0, 2, 2, (Part(0, 1, 2), Part(1, 2, 1))),), layers, cluster)
    assert plan.replication == "4-2"
    # 4 and 2 replicas reduce 1 and 3 bytes, and 5 cross the cut in both ways.
    assert communicated_bytes(plan.stages, layers) == 2 * 3 * 1 / 4 + 2 * 1 * 3 / 2 + 2 * 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LayerCosts([1.0], [1.0, 2.0], [1.0]), "2 .crossing_bytes."),
        (lambda: LayerCosts([], [], []), "give one entry per layer"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        call()


def test_a_flat_cluster_has_the_slowest_links() -> None:
    assert flat(CLUSTERS["pipedream-a"]).levels == (Level(16, 1.25e9, 5e-5),)
