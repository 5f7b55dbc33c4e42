"""Meshes: whatever the planner chooses is decided, fits, can be simulated, and is the best of all small ones."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import PartitionError, UserError
from hf_gpipe.partition.cluster import parse_cluster
from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import allowed_plans, best_plan, search_all
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.planner.search.meshes import with_mesh
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import Placement, placement_for
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig
from tests.planner.models import DEVICE, MIB, blocks, layer, model, planner

FREE = PipelineConfig("auto", "auto", "auto", "none", "auto", replicas="auto")


def every_mesh(num_processes: int, num_layers: int) -> list[Placement]:
    """Each way to share out the processes among stages that the planner has, in the orders that it has."""
    found = {}
    for num_stages in range(1, min(num_layers, num_processes) + 1):
        for cuts in combinations(range(1, num_processes), num_stages - 1):
            ends = list(pairwise((0, *cuts, num_processes)))
            found[Placement([range(*one) for one in ends])] = None
    for replicas in range(1, num_processes + 1):
        of_pipeline = num_processes // replicas
        for num_stages in (of_pipeline, 2 * of_pipeline):
            if num_processes % replicas == 0 and num_stages <= num_layers:
                found[placement_for("gpipe", num_stages, num_processes, replicas)] = None
    return list(found)


def brute_force(within: Planner, config: PipelineConfig) -> Plan:
    """The best plan of all meshes, each planned by itself, without tables that are made for the best one."""
    plans = []
    for placement in every_mesh(config.processes, within.num_layers):
        if max(placement.replicas) > int(config.num_micro_batches):
            continue
        try:
            plans += allowed_plans(within, with_mesh(config, placement))
        except PartitionError:
            continue
    return min(plans, key=attrgetter("sort_key"))


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_the_choice_is_the_best_of_all(data: st.DataObject) -> None:
    few = st.integers(1, 6)
    layers = [
        layer(f"h.{index}", weights=data.draw(few) * MIB, flops=data.draw(few), boundary=data.draw(few) * MIB)
        for index in range(data.draw(st.integers(1, 5)))
    ]
    num_processes, num_micro_batches = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 6]))
    within = planner(model(*layers), rows=num_micro_batches)
    if num_processes == 4 and data.draw(st.booleans()):
        within.cluster = parse_cluster(data.draw(st.sampled_from(["2x2@1MB/s,100MB/s", "2x2@100MB/s,1GB/s"])))
    elif data.draw(st.booleans()):
        within.speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=num_processes, max_size=num_processes))
    config = FREE.replace(
        num_processes=num_processes,
        num_micro_batches=num_micro_batches,
        schedule=data.draw(st.sampled_from(["1f1b", "gpipe", "auto"])),
        recompute=data.draw(st.sampled_from(["none", "stage", "auto"])),
        zero=data.draw(st.sampled_from([0, 1])),
    )
    if data.draw(st.booleans()):
        whole = best_plan(within, config).peak_bytes
        within = within.within(int(whole * data.draw(st.sampled_from([0.6, 0.9, 1.0]))))
    try:
        expected = brute_force(within, config)
    except (PartitionError, ValueError):
        with pytest.raises(PartitionError):
            best_plan(within, config)
        return
    plan = best_plan(within, config)
    assert type(plan.settings) is DecidedConfig
    assert plan.settings.is_decided
    assert plan.settings.num_processes == num_processes
    assert plan.fits >= expected.fits
    if expected.fits:
        assert plan.sort_key[1] <= expected.sort_key[1]
    if plan.settings.schedule != TABLE_FILE:
        assert plan.fits == expected.fits
        assert plan.settings.placed(plan.settings.schedule) == plan.timeline.schedule.placement
        # The configuration alone makes the same plan.
        assert within.plan(plan.settings).step_seconds == plan.step_seconds


def test_a_mesh_that_fits_under_one_schedule_alone_is_found() -> None:
    """1f1b fits two of the meshes, of which neither lacks the least memory under the schedule that is tried first."""
    sizes = [(5, 1, 1), (1, 1, 2), (5, 5, 1)]
    layers = [layer(f"h.{i}", weights=w * MIB, flops=f, boundary=b * MIB) for i, (w, f, b) in enumerate(sizes)]
    within = planner(model(*layers), rows=4).within(31_520_194)
    asked = FREE.replace(num_processes=3, num_micro_batches=4, schedule="auto", recompute="none")
    plan = best_plan(within, asked)
    assert plan.fits
    assert plan.step_seconds <= brute_force(within, asked).step_seconds


def test_a_dear_head_gets_more_replicas() -> None:
    """Four blocks of 3 s and a head of 24 s: two stages 1-2 are faster than any even mesh of three processes."""
    costs = model(*(layer(f"h.{i}") for i in range(4)), layer("head", kind="head", flops=8))
    plan = best_plan(planner(costs, rows=12), FREE.replace(num_processes=3, num_micro_batches=12, schedule="1f1b"))
    slow_links = planner(costs, rows=12)
    slow_links.cluster = parse_cluster("3@1MB/s")
    uneven = best_plan(slow_links, FREE.replace(num_processes=3, num_micro_batches=12, schedule="1f1b"))
    assert plan.settings.replicas == 3
    assert uneven.settings.replicas == (1, 2)
    assert uneven.settings.partition == (4, 1)


def test_stages_or_replicas_that_are_given_are_kept() -> None:
    within = planner(blocks(8), rows=8)
    for num_stages in (1, 2, 3, 4, 8):
        plan = best_plan(within, FREE.replace(num_stages=num_stages, num_processes=4, num_micro_batches=8))
        assert plan.settings.num_stages == num_stages
    for replicas in (1, 2, 4):
        plan = best_plan(within, FREE.replace(replicas=replicas, num_processes=4, num_micro_batches=8))
        assert plan.settings.replicas == replicas
    with pytest.raises(UserError, match=r"no mesh of 4 processes has num_stages=auto and replicas=3 .* 8 layers"):
        best_plan(within, FREE.replace(replicas=3, num_processes=4))


def test_a_replica_without_a_micro_batch_holds_the_weights() -> None:
    """More replicas than micro-batches are of no use, and can be planned."""
    within = planner(blocks(4), rows=2)
    mesh = PipelineConfig(num_stages=1, replicas=3, num_micro_batches=2, num_processes=3)
    plan = within.plan(mesh.decided(schedule="gpipe", recompute="none", partition=(4,)))
    used, _, idle = [process.memory for process in plan.processes]
    assert idle.parameters == used.parameters > 0
    assert idle.activations == 0 < used.activations


def test_every_replica_gets_a_micro_batch() -> None:
    for rows in (2, 3, 8):
        within = planner(blocks(4), rows=rows)
        for config in (
            FREE.replace(num_processes=4, num_micro_batches="auto", schedule="auto"),
            PipelineConfig(2, "auto", "auto", "none", "auto", replicas=2),
        ):
            plan = best_plan(within, config)
            assert plan.timeline.schedule.num_micro_batches >= max(plan.timeline.schedule.placement.replicas)
    accumulated = planner(blocks(4), rows=1, accumulation=2)
    assert best_plan(accumulated, PipelineConfig(2, "auto", "auto", "none", "auto", replicas=2)).settings.replicas == 2
    few = planner(blocks(4), rows=2)
    for num_micro_batches in ("auto", 4):
        with pytest.raises(UserError, match="at most 2 micro-batches and a stage has 3 replicas"):
            best_plan(few, FREE.replace(replicas=3, num_processes=3, num_micro_batches=num_micro_batches))
    with pytest.raises(UserError, match="at most 2 micro-batches and a stage has 3 replicas"):
        best_plan(few, PipelineConfig(1, "auto", "auto", "auto", "auto", replicas=3))


def test_zero_counts_where_there_are_replicas() -> None:
    within = planner(blocks(4, weights=100 * MIB), rows=4, optim="adamw_torch")
    config = FREE.replace(num_processes=2, num_micro_batches=4, zero=1)
    assert best_plan(within, config.replace(replicas=2)).settings.zero == 1
    assert best_plan(within, config.replace(replicas=1)).settings.zero == 0


def test_stages_stay_inside_of_machines_that_are_far_apart() -> None:
    """Eight blocks on 2x4 devices whose machines are far apart: little crosses between them."""
    within = planner(blocks(8, weights=1000 * MIB), rows=16)
    within.cluster = parse_cluster("2x4@100MB/s,100GB/s")
    found = search_all([(within, PipelineConfig(num_processes=1).with_auto(8))])
    best = found.fastest[0]
    assert len({plan.settings.num_stages for plan in found.fastest}) > 2
    # Each stage is inside of one machine, so that no gradient crosses.
    for own in best.timeline.schedule.placement.workers:
        assert len({process // 4 for process in own}) == 1
    assert best.settings.is_decided


@pytest.mark.parametrize("limits", [*permutations((400, 150, 150))])
def test_unlike_devices_hold_what_fits_them(limits: tuple[int, ...]) -> None:
    costs = blocks(8, weights=30 * MIB, saved=MIB)
    within = planner(costs, rows=4, memory_bytes=tuple(limit * MIB for limit in limits))
    plan = best_plan(within, PipelineConfig(3, 4, "1f1b", "none", "auto"))
    assert plan.fits
    assert max(plan.settings.partition) == plan.settings.partition[limits.index(400)]
    # A stage takes the smallest memory of its replicas.
    assert within.limits_of(Placement([(0, 1, 2)])) == [150 * MIB]
    with pytest.raises(PartitionError, match="fits the processes' memory"):
        best_plan(within, PipelineConfig(1, 4, "1f1b", "none", "auto", replicas=3))


def test_a_faster_device_gets_more_layers() -> None:
    within = planner(blocks(9), rows=8)
    within.speeds = [2.0, 1.0]
    plan = best_plan(within, PipelineConfig(2, 8, "1f1b", "none", "auto"))
    assert plan.settings.partition == (6, 3)
    with pytest.raises(UserError, match="speeds has 2 entries and the plan has 3 processes"):
        best_plan(within, PipelineConfig(3, 8, "1f1b", "none", "auto"))


def _of_rows(memory_bytes: int, num_rows: int = 64, num_blocks: int = 8) -> Planner:
    """A model whose blocks keep more for each row of a micro-batch."""

    def costs_of(rows: int, _: int) -> list[ModelCosts]:
        sizes = {"boundary": rows * MIB, "saved": 64 * rows * MIB, "block_saved": 64 * rows * MIB}
        return [blocks(num_blocks, weights=MIB, **sizes)]

    return Planner(costs_of, PlanInputs(Workload(num_rows, 1, 1), optim="sgd"), DEVICE, memory_bytes)


def test_smaller_micro_batches_are_tried_where_nothing_fits() -> None:
    free = FREE.replace(num_micro_batches="auto", schedule="auto", recompute="auto", num_processes=2)
    # With recomputation a stage of four blocks holds 256 MiB a row for the micro-batch that runs backward.
    best = best_plan(_of_rows(1024 * MIB), free)
    assert best.fits
    assert best.settings.num_micro_batches > 8, "two processes begin with at most eight"
    small = _of_rows(8 * MIB)
    with pytest.raises(PartitionError) as found:
        best_plan(small, free)
    with pytest.raises(PartitionError) as smallest:
        best_plan(small, free.replace(num_stages=2, replicas=1, num_micro_batches=64))
    assert found.value.fullness <= smallest.value.fullness, "the message is that of the one that lacks the least"


def test_more_processes_than_layers_get_smaller_micro_batches_too() -> None:
    free = FREE.replace(num_micro_batches="auto", schedule="auto", recompute="auto", num_processes=3)
    best = best_plan(_of_rows(140 * MIB, num_rows=32, num_blocks=2), free)
    assert best.fits
    assert best.settings.num_micro_batches == 32, "three processes begin with at most 16, of two rows"
