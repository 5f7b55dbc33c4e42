"""Orders of unlike processes: of few processes all are tried, and the chosen one is the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import PartitionError
from hf_gpipe.planner.choose import best_plan, rank
from hf_gpipe.planner.mesh import Mesh
from hf_gpipe.planner.orders import exchanges, kinds_of, orders
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.schedule import Placement, placement_for
from tests.planner.models import MIB, layer, model, planner

FREE = PipelineConfig("auto", 4, "1f1b", "none", "auto", replicas="auto")


def looks(placement: Placement, kinds: list[int]) -> dict[tuple[int, ...], list[int]]:
    """The kinds of the processes that hold the same stages."""
    found: dict[tuple[int, ...], list[int]] = {}
    for process, kind in enumerate(kinds):
        found.setdefault(placement.stages_of(process), []).append(kind)
    return {stages: sorted(own) for stages, own in found.items()}


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_few_processes_have_all_orders_that_differ(data: st.DataObject) -> None:
    num_processes = data.draw(st.integers(1, 4))
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=num_processes, max_size=num_processes))
    replicas = data.draw(st.sampled_from([one for one in (1, 2, 4) if num_processes % one == 0]))
    num_stages = num_processes // replicas * data.draw(st.sampled_from([1, 2]))
    given_order = placement_for("gpipe", num_stages, num_processes, replicas)
    found = orders(given_order, kinds)
    expected = []
    for names in permutations(range(num_processes)):
        one = looks(Placement([[names[process] for process in own] for own in given_order.workers]), kinds)
        if one not in expected:
            expected.append(one)
    assert found[0] == given_order
    assert len(found) == len(expected)
    assert all(looks(one, kinds) in expected for one in found)
    for one in exchanges(given_order, kinds):
        assert looks(one, kinds) in expected
        assert looks(one, kinds) != looks(given_order, kinds)


def test_processes_that_can_stay_stay() -> None:
    pipelines = Placement([(0, 2), (1, 3)])
    assert [str(one) for one in orders(pipelines, [0, 0, 1, 1])] == ["0,2 1,3", "3,2 1,0", "0,1 2,3"]


def brute_force(within: Planner, config: PipelineConfig) -> Plan:
    """The best plan of all meshes in every order of the processes, each planned by itself."""
    processes, plans = range(config.processes), []
    for count in range(1, config.processes + 1):
        for cuts in combinations(processes[1:], count - 1):
            for names in permutations(processes):
                workers = [names[start:stop] for start, stop in pairwise((0, *cuts, config.processes))]
                one = Mesh.of(Placement(workers)).configure(config, 4)
                try:
                    plans.append(best_plan(within, one))
                except PartitionError:
                    continue
    return min(plans, key=rank)


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
    config = replace(FREE, num_processes=num_processes)
    peak = best_plan(within, config).peak_bytes
    within = within.within(tuple(int(peak * one * 1.5) for one in data.draw(each)))
    try:
        expected = brute_force(within, config)
    except ValueError:
        return
    plan = best_plan(within, config)
    assert plan.fits == expected.fits
    if plan.fits:
        assert rank(plan)[1] <= rank(expected)[1]
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
    plan = best_plan(within, replace(config, replicas="auto"))
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
    plan = best_plan(within, replace(config, replicas="auto"))
    assert plan.timeline.schedule.placement.workers[3] == (0,)
    assert plan.step_seconds < 0.6 * best_plan(within, config).step_seconds
    assert kinds_of(None, within.speeds, 5) == list(range(5))


def test_many_processes_that_are_hardly_alike_have_some_orders() -> None:
    free = [80_000 * MIB - index * MIB for index in range(31)]
    assert set(kinds_of((*free, 70_000 * MIB), None, 32)) == {0, 1}, "what is free differs a little on equal devices"
    together = Placement([tuple(range(32))])
    assert orders(together, range(32)) == [together]
    assert orders(Placement([tuple(range(16)), tuple(range(16, 32))]), range(32))
