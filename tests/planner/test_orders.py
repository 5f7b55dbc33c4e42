"""The search for a mesh: of few processes all meshes are tried in all orders, and to every other it can come."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.cluster import parse_cluster
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.search.meshes import Meshes, with_mesh
from hf_gpipe.schedule import Placement
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.planner.models import MIB, blocks, layer, model, planner

FREE = PipelineConfig("auto", 4, "1f1b", "none", "auto", replicas="auto")


def meshes(num_processes: int, speeds: list[float] | None = None, **options: object) -> Meshes:
    """Those of a model of 12 blocks."""
    within = planner(blocks(12), rows=num_processes)
    within.speeds = speeds
    return Meshes(within, FREE.replace(num_processes=num_processes, **options))  # type: ignore[arg-type]  # fields


def looks(placement: Placement, speeds: list[float]) -> tuple[tuple[float, ...], ...]:
    """The speeds of the processes of each stage."""
    return tuple(tuple(sorted(speeds[process] for process in own)) for own in placement.workers)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_search_begins_with_every_mesh_of_few_processes(data: st.DataObject) -> None:
    num_processes = data.draw(st.integers(1, 4))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=num_processes, max_size=num_processes))
    first = [looks(placement, speeds) for placement in meshes(num_processes, speeds).first()]
    assert len(set(first)) == len(first), "of meshes that look alike there is one"
    for count in range(1, num_processes + 1):
        for cuts in combinations(range(1, num_processes), count - 1):
            for row in permutations(range(num_processes)):
                placement = Placement([row[start:stop] for start, stop in pairwise((0, *cuts, num_processes))])
                assert looks(placement, speeds) in first


@pytest.mark.parametrize(("num_stages", "number"), [("auto", 2**5), (3, 10)])
def test_every_mesh_can_be_reached(num_stages: int | str, number: int) -> None:
    """Six processes can be shared out to stages in 32 ways, and to three stages in 10."""
    mesh = meshes(6, num_stages=num_stages)
    waiting = mesh.first()
    reached = {}
    while waiting:
        placement = waiting.pop()
        reached[placement] = None
        waiting += [other for other in mesh.beside(placement) if other not in reached]
    alone = [placement for placement in reached if len(placement.places) == 6]
    assert len({placement.replicas for placement in alone}) == len(alone) == number


def test_unlike_processes_change_places_and_the_others_stay() -> None:
    pipelines = Placement([(0, 2), (1, 3)])
    beside = meshes(4, [1.0, 1.0, 2.0, 2.0], num_stages=2, replicas=2).beside(pipelines)
    assert {str(placement) for placement in beside} == {"3,2 1,0", "0,1 2,3"}


def test_a_cut_moves_in_all_machines_at_once() -> None:
    within = planner(blocks(12), rows=8)
    within.cluster = parse_cluster("2x4@1GB/s,10GB/s")
    beside = Meshes(within, FREE.replace(num_processes=8)).beside(Placement([(0, 4, 1, 5), (2, 6, 3, 7)]))
    assert Placement([(0, 4, 1, 5, 2, 6), (3, 7)]) in beside


def brute_force(within: Planner, config: PipelineConfig) -> Plan | None:
    """The best plan of all meshes in every order of the processes, each planned by itself."""
    processes, plans = range(config.processes), []
    for count in range(1, config.processes + 1):
        for cuts in combinations(processes[1:], count - 1):
            for names in permutations(processes):
                workers = [names[start:stop] for start, stop in pairwise((0, *cuts, config.processes))]
                try:
                    plans.append(best_plan(within, with_mesh(config, Placement(workers))))
                except PartitionError:
                    continue
    return min(plans, key=attrgetter("sort_key"), default=None)


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_the_chosen_order_is_the_best_of_all(data: st.DataObject) -> None:
    few = st.integers(1, 6)
    layers = [
        layer(f"h.{i}", weights=data.draw(few) * MIB, flops=data.draw(few), saved=data.draw(few) * MIB)
        for i in range(data.draw(st.integers(2, 5)))
    ]
    num_processes = data.draw(st.sampled_from([2, 3, 3]))
    each = st.lists(st.sampled_from([0.5, 1.0]), min_size=num_processes, max_size=num_processes)
    within = planner(model(*layers), rows=4)
    within.speeds = data.draw(st.none() | each)
    config = FREE.replace(num_processes=num_processes)
    peak = best_plan(within, config).peak_bytes
    within = within.within(tuple(int(peak * one * 1.5) for one in data.draw(each)))
    expected = brute_force(within, config)
    if expected is None:
        return
    plan = best_plan(within, config)
    assert plan.fits == expected.fits
    if plan.fits:
        assert plan.sort_key[1] <= expected.sort_key[1]
    assert within.plan(plan.settings).step_seconds == plan.step_seconds


@pytest.mark.parametrize("num_processes", [3, 7])
def test_the_large_device_gets_the_large_stage(num_processes: int) -> None:
    """A large embedding comes first, and the process with room for it is the last one."""
    large = layer("embedding", kind="embedding", weights=1000 * MIB)
    costs = model(large, *(layer(f"h.{i}") for i in range(2 * num_processes)))
    limits = (*[400 * MIB] * (num_processes - 1), 4000 * MIB)
    within = planner(costs, rows=8, memory_bytes=limits)
    config = PipelineConfig(num_processes, 8, "1f1b", "none", "auto", num_processes=num_processes)
    with pytest.raises(PartitionError):
        best_plan(within, config)
    plan = best_plan(within, config.replace(replicas="auto"))
    assert plan.fits
    first, *others = plan.timeline.schedule.placement.workers
    assert first == (num_processes - 1,)
    assert plan.settings.placement == " ".join(str(one[0]) for one in (first, *others))
    # The others are where they were, but for the one that has changed places with it.
    assert [one for own in others for one in own].count(0) == 1


def test_two_processes_are_exchanged_as_long_as_it_helps() -> None:
    """Five unlike speeds have too many orders to try all; the fast process belongs to the dear layer in the middle."""
    costs = model(*(layer(f"h.{i}", flops=8 if i == 3 else 2) for i in range(5)))
    within = planner(costs, rows=8, memory_bytes=90 * MIB)
    within.speeds = [4.0, 1.0, 1.1, 1.2, 1.3]
    config = PipelineConfig(5, 8, "1f1b", "none", "auto", num_processes=5)
    plan = best_plan(within, config.replace(replicas="auto"))
    assert plan.timeline.schedule.placement.workers[3] == (0,)
    assert plan.step_seconds < 0.6 * best_plan(within, config).step_seconds
    assert within.within(None).classes(5) == list(range(5))


def test_devices_that_differ_a_little_are_of_one_class() -> None:
    free = [80_000 * MIB - index * MIB for index in range(31)]
    processes = planner(blocks(1)).within((*free, 70_000 * MIB))
    assert set(processes.classes(32)) == {0, 1}, "what is free differs a little on equal devices"
