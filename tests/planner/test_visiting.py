"""The planner of weights that visit: hosts, what is chosen where something is open, and what limits a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from hf_gpipe.adapters.chain import Chain
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.model.companion import OpenCompanion
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.late_updates import LATE_UPDATE
from hf_gpipe.modes.visits.search import open_visitors, visiting_ways, way
from hf_gpipe.modes.visits.visit import LOAD
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.planner.machines.devices import LINKS, Host, read_host
from hf_gpipe.planner.of_model import planner_of
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.report import host_lines, overrides, report, search_report
from hf_gpipe.planner.search.advice import limit_of_step
from hf_gpipe.planner.search.choose import best_plan, search_all
from hf_gpipe.planner.traffic import traffic
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule.kinds import RECOMPUTE
from hf_gpipe.schedule.messages import messages
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.planner.models import DEVICE, MIB, blocks, layer, model, planner, settings

#: A byte in a second, by each way.
SLOW = Host(replace(LINKS["pcie4"], bytes_per_second=float(MIB)), 1, 4.0 * MIB, float(MIB))


def with_host(made: Planner, host: Host) -> Planner:
    made.device = replace(DEVICE, host=host)
    return made


def dealt(partition: tuple[int, ...], size: int, **changes: Any) -> Any:
    given = {"schedule": "round_robin", "recompute": "stage", "offload_weights": "all", "num_processes": size}
    return settings(partition, **given | changes)


def test_what_the_host_of_shared_stages_holds_and_does() -> None:
    """Each weight is there once, its copies and its update take the time of links and memory that are shared."""
    costs = blocks(8)
    for host, copy_seconds in (
        (SLOW, 10.0),
        (replace(SLOW, devices_per_link=4), 20.0),
        (replace(SLOW, bytes_per_second=1.0 * MIB), 20.0),
    ):
        plan = with_host(planner(costs, optim="adamw_torch"), host).plan(dealt((1,) * 8, 2))
        copies = [float(span.busy) for span in plan.timeline.spans if span.action.kind == LOAD]
        assert copies == pytest.approx([copy_seconds] * len(copies))
        # Weights, gradients and two values for each weight.
        assert plan.hosted_bytes == [4 * 40 * MIB] * 2
        rate = min(1.0, host.bytes_per_second / MIB / 2)
        # All of these are read and written, and gradients are read for their norm.
        assert plan.processes[0].time.update == pytest.approx((4 * 2 + 1) * 40 / rate)
        assert plan.processes[0].memory.optimizer == 0
    one, several = (
        with_host(planner(costs), SLOW).plan(dealt((1,) * 8, size, schedule="breadth_first")) for size in (1, 2)
    )
    assert sum(one.hosted_bytes) == sum(several.hosted_bytes) == 2 * 80 * MIB


def test_state_on_a_disk_takes_no_memory_of_the_host() -> None:
    """The state counted as CPU memory, and its update took as long as one in memory."""
    half, host = replace(blocks(8), dtype="bfloat16"), replace(SLOW, disk_bytes_per_second=8.0 * MIB)
    inputs = {"optim": "adamw_torch", "fp32_master_weights": True}
    for schedule in ("round_robin", "breadth_first"):
        asked = dealt((1,) * 8, 2, schedule=schedule)
        in_memory, on_disk = (
            with_host(planner(half, **inputs, state_on_disk=given), host).plan(asked) for given in (False, True)
        )
        # Master weights and two moments, each of twice the bytes.
        assert [own.on_disk for own in on_disk.on_hosts] == [6 * 40 * MIB] * 2
        assert [own.on_disk for own in in_memory.on_hosts] == [0, 0]
        assert in_memory.hosted_bytes == [(2 + 8) * 40 * MIB] * 2
        # Gradients of the master weights are there for one stage.
        assert on_disk.hosted_bytes == [2 * 40 * MIB + 2 * 10 * MIB] * 2
        updating = [
            sum(span.busy for span in plan.timeline.by_process[0] if span.action.kind.part == "update")
            for plan in (on_disk, in_memory)
        ]
        assert updating[0] - updating[1] == pytest.approx(2 * 6 * 40 / 4)
        assert "480 MiB in all" in host_lines(on_disk)["disk"]
    offloaded = planner(half, **inputs, offload_optimizer=True, state_on_disk=True).plan(settings((8,)))
    assert [(own.offloaded, own.on_disk) for own in offloaded.on_hosts] == [(2 * 80 * MIB, 6 * 80 * MIB)]


def test_late_updates_are_hidden_by_forwards() -> None:
    """U has the norm alone. Of the rest a step takes what is longer than the forwards of the stages before."""
    host = replace(SLOW, bytes_per_second=80.0 * MIB, process_bytes_per_second=40.0 * MIB)
    plan = with_host(planner(blocks(8), optim="adamw_torch"), host).plan(dealt((1,) * 8, 1, schedule="breadth_first"))
    time, spans = plan.processes[0].time, plan.timeline.by_process[0]
    assert time.update == pytest.approx(80 / 40)
    late = [span for span in spans if span.action.kind == LATE_UPDATE]
    assert [span.action.stage for span in late] == [*range(8)]
    # Weights, gradients and two moments are read and written.
    assert sum(span.busy for span in late) == pytest.approx(2 * 4 * 80 / 40)
    loads = {span.action.stage: span.start for span in reversed(spans) if span.action.kind == LOAD}
    assert all(loads[span.action.stage] >= span.end for span in late)
    forwards = {span.action.stage: span.start for span in reversed(spans) if span.action.kind == "F"}
    assert forwards[0] < late[-1].start


def test_a_plan_that_waits_for_late_updates_is_reported() -> None:
    """The advice skips kinds of recomputation with which weights cannot visit; they ended the report in an error."""
    asked = dealt((1,) * 8, 1, schedule="breadth_first")
    plan = with_host(planner(blocks(8), rows=8, optim="adamw_torch"), SLOW).plan(asked)
    assert plan.bubble > 0.4
    assert report(plan).startswith("verdict")


def test_updates_beside_backwards_owners_and_messages() -> None:
    """Where nothing needs the norm; a step is shorter by most of them, and each is of the worker that has least."""
    heavy = layer("embed", weights=3 * MIB, flops=100)
    costs = model(heavy, *blocks(7).layers)
    host = replace(SLOW, bytes_per_second=8.0 * MIB, process_bytes_per_second=4.0 * MIB)
    plans = {}
    for needs_norm in (True, False):
        made = with_host(planner(costs, rows=4, optim="adamw_torch", needs_norm=needs_norm), host)
        plans[needs_norm] = made.plan(dealt((1,) * 8, 2, num_micro_batches=4))
    last, beside = (plans[one].timeline for one in (True, False))
    assert HOST_UPDATE in beside.schedule.kinds
    assert HOST_UPDATE not in last.schedule.kinds
    assert beside.total_seconds < last.total_seconds
    assert beside.schedule.placement == last.schedule.placement
    sizes = [plans[True].layout.sums.owned(*stage.run).count for stage in plans[True].layout.stages]
    loads = [sum(sizes[stage] for stage in process.stages) for process in plans[True].processes]
    assert max(loads) - min(loads) <= max(sizes[1:])
    # What the table sends: a recomputation on another worker than its forward receives the inputs too.
    table, plan = beside.schedule, plans[False]
    every = [one for one in messages(table) if not one.source.kind.is_signal]
    size = {stage.number: costs.layers[stage.layers.start] for stage in plan.stages}
    expected = sum(
        size[one.source.stage].gradient_input_bytes
        if one.source.kind.takes_gradient
        else size[one.source.stage + 1].input_bytes
        for one in every
    )
    assert any(one.consumer.kind == RECOMPUTE for one in every)
    assert traffic(plan).boundaries == expected / 4 > 0


def test_a_machine_without_the_memory_does_not_fit() -> None:
    made = with_host(planner(blocks(8), memory_bytes=200 * MIB), replace(SLOW, memory_bytes=100 * MIB))
    plan = made.plan(dealt((1,) * 8, 2))
    assert plan.host_fullness == 1.6
    assert not plan.fits
    found = report(plan)
    assert "weights that visit need 160 MiB of 100 MiB of CPU memory" in found
    assert "use machines with more CPU memory" in found
    # Where no one says what the device has, and of the fullest of several machines.
    made.memory_bytes = None
    assert "does not fit: process 0 needs" in report(made.plan(dealt((1,) * 8, 2)))
    made.cluster = Cluster((replace(LINKS["nvlink4"], parts=1), LINKS["ethernet-10"]))
    plan = made.plan(dealt((1,) * 8, 2, schedule="breadth_first"))
    assert (plan.machine_bytes, sum(plan.hosted_bytes), plan.host_fullness) == (80 * MIB, 160 * MIB, 0.8)
    assert plan.fits
    made.device = replace(made.device, host=replace(SLOW, memory_bytes=0))
    assert not made.plan(dealt((1,) * 8, 2, schedule="breadth_first")).fits


def test_a_heavy_head_has_a_slot_of_its_own() -> None:
    """Where something is open, slots are made of the plan's seconds; under a limit of memory they are smaller."""
    costs = model(*(layer(f"h.{number}", seconds=1.0) for number in range(12)), layer("head", kind="head", seconds=4.0))
    config = dealt((1,) * 13, 4).reopened(recompute="auto", num_micro_batches=8)
    made = planner(costs, rows=8)
    equal = made.plan(dealt((1,) * 13, 4, num_micro_batches=8))
    best = best_plan(made, config)
    assert best.timeline.schedule.placement.is_shared
    assert best.step_seconds < 0.9 * equal.step_seconds
    assert "pipeline.schedule=round_robin pipeline.recompute=auto" in overrides(best, config)
    assert "pipeline.offload_weights=all" in overrides(best, config)
    # A recipe that has another value must be given the default.
    assert "pipeline.replicas=1" not in overrides(best, config)
    assert "pipeline.replicas=1" in overrides(best, config.replace(replicas=2))
    tight = best_plan(made.within(best.peak_bytes - MIB), config)
    assert tight.fits
    assert tight.step_seconds >= best.step_seconds


def test_visits_are_chosen_where_weights_do_not_fit_and_only_there() -> None:
    free = PipelineConfig(num_stages=2).with_auto(2)
    costs = blocks(12, weights=100 * MIB, flops=1000)
    host = Host(replace(LINKS["pcie4"], bytes_per_second=1e12), 1, 1e12, 1e12)
    roomy, tight = (
        best_plan(with_host(planner(costs, rows=8, memory_bytes=limit), host), free) for limit in (1 << 40, 900 * MIB)
    )
    assert roomy.settings.offload_weights is None
    assert tight.fits
    assert tight.settings.offload_weights == "all"
    assert "pipeline.offload_weights=null" in overrides(roomy, tight.settings)
    found = search_report(search_all([(with_host(planner(costs, rows=8, memory_bytes=900 * MIB), host), free)]), free)
    assert "does not fit, weights stay on their devices" in found
    assert "offload_weights=all, round_robin" in found
    assert "offload_weights=all, breadth_first" in found


def test_as_many_stages_stay_as_fit() -> None:
    costs = blocks(12, weights=100 * MIB, flops=4)
    asked = settings((1,) * 12, schedule="breadth_first", recompute="stage", offload_weights="all", num_processes=1)
    roomy = with_host(planner(costs, memory_bytes=1 << 40), SLOW)
    given = {count: roomy.plan(asked.replace(resident_stages=count)) for count in (0, 3, 6, 9)}
    seconds = [float(plan.step_seconds) for plan in given.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 2 * seconds[-1]
    needs = [plan.peak_bytes for plan in given.values()]
    assert needs == sorted(needs)
    config = asked.reopened(resident_stages="auto")
    assert best_plan(roomy, config).settings.resident_stages == 9
    tight = best_plan(roomy.within(needs[2]), config)
    assert tight.settings.resident_stages == 6
    assert "pipeline.resident_stages=6" in overrides(tight, config)
    assert best_plan(roomy.within(needs[0] - MIB), config).settings.resident_stages == 0
    # Where it is open which weights visit, the number that stays is open too.
    free = with_host(planner(costs, rows=8, memory_bytes=1000 * MIB), SLOW)
    assert best_plan(free, PipelineConfig(num_stages=12).with_auto(1)).settings.resident_stages > 0


def test_which_weights_may_visit() -> None:
    """Of dealt stages they do on a CPU too. Of a model with a BatchNorm, one row would be too few to ask for them."""
    made = planner(blocks(8))
    made.device = replace(DEVICE, has_host=False)
    config = PipelineConfig("auto", "auto", "round_robin", "auto", "auto", offload_weights="auto", num_processes=2)
    assert best_plan(made, config).settings.offload_weights == "all"
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    rows = Workload(4, 1, 1, has_padding=False, entries=(("x", (8,), "float32"), ("labels", (), "int64")))
    assert open_visitors(planner_of(Chain(module, rows.shapes), PlanInputs(rows), DEVICE, as_on_gpu=True)) == ("all",)
    # Each of two replicas has two processes.
    config = PipelineConfig(num_stages="auto", schedule="auto", replicas=2, num_processes=4, offload_weights="frozen")
    assert {
        each.num_stages for each in visiting_ways(planner(blocks(9)), config.with_defaults(can_plan=True), [4])
    } == {8}
    # What a run refuses: a teacher beside them, and the sums of replicas whose gradients are on the host.
    costs = blocks(12, weights=100 * MIB)
    student = Chain(module, rows.shapes)
    teacher = OpenCompanion("teacher", ModelSpec(module), student)
    assert open_visitors(planner_of(student, PlanInputs(rows), DEVICE, companion=teacher)) == ()
    with pytest.raises(ScheduleError, match="offload_weights is all and stages have replicas"):
        planner(costs).plan(dealt((1,) * 12, 4, schedule="breadth_first", replicas=2))


def test_what_limits_a_step() -> None:
    fast = Host(replace(LINKS["pcie4"], bytes_per_second=1e15), 1, 1e15, 1e15)
    words = {}
    for name, host in {
        "update": replace(fast, bytes_per_second=1e6, process_bytes_per_second=1e6),
        "copies": replace(fast, link=replace(fast.link, bytes_per_second=2e5)),
        "layers": fast,
    }.items():
        plan = with_host(planner(blocks(8), rows=16), host).plan(dealt((1,) * 8, 2, num_micro_batches=16))
        words[name] = limit_of_step(plan)
        assert way(plan) == "offload_weights=all, round_robin"
    assert words["copies"].startswith("copies of weights; ")
    assert words["layers"].startswith("the layers, whose products are taken to run at")
    assert words["update"].startswith(("the update in CPU memory; ", "copies of weights; "))


def test_options_of_the_host() -> None:
    assert read_host(None, None, None) == Host()
    assert read_host(None, None, "9GB/s", SLOW) == replace(SLOW, bytes_per_second=9e9, process_bytes_per_second=9e9)
    found = read_host("pcie3/2", "256GiB", "50GB/s")
    assert (found.link, found.devices_per_link) == (LINKS["pcie3"], 2)
    assert (found.memory_bytes, found.process_rate(2), found.copy_rate(2)) == (256 << 30, 2.5e10, 6.25e9)
    assert read_host(None, None, None, disk="6GB/s").disk_rate(2) == 3e9
    assert read_host("20GB/s", None, None).copy_rate(1) == 2e10
    for link in ("pcie9", "pcie4/0", "pcie4/x"):
        with pytest.raises(UserError, match="--host-link"):
            read_host(link, None, None)
    with pytest.raises(UserError, match="a table; give the weights that visit"):
        PipelineConfig(num_stages=4, schedule="mine.txt", num_micro_batches=2, offload_weights="auto")
