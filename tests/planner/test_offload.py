"""The planner of graphs that wait on the host: their price, when they are chosen, and what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_gpipe.modes.host_graphs.search import instead
from hf_gpipe.modes.host_graphs.table import OFFLOAD, PREFETCH
from hf_gpipe.planner.machines.devices import LINKS, Host
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.report import overrides, report
from hf_gpipe.planner.search.advice import limit_of_step
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.settings.pipeline import DecidedConfig
from tests.planner.models import DEVICE, MIB, blocks, planner, settings

#: A forward takes a second and a backward two, and a graph of 40 MiB is on the way for so many.
GRAPH = 40 * MIB


def made(seconds: float, limit: int | None = None, ways: int = 2, on_host: int | None = None) -> Planner:
    """Of eight equal layers on eight processes, whose links take these seconds, or their memory with `ways` 1."""
    one = planner(blocks(8, saved=GRAPH, block_saved=GRAPH), rows=16, memory_bytes=limit)
    link = replace(LINKS["pcie4"], bytes_per_second=GRAPH / seconds if ways == 2 else 1e30)
    memory = 1e30 if ways == 2 else 16 * GRAPH / seconds
    one.device = replace(DEVICE, host=Host(link, 1, memory, memory, on_host))
    return one


def way(recompute: str | tuple[str | int, ...]) -> DecidedConfig:
    return settings((1,) * 8, num_micro_batches=16, schedule="1f1b", recompute=recompute)


def first_stage(plan: Plan) -> float:
    return plan.processes[0].memory.activations / GRAPH


def test_the_price() -> None:
    plain, again = (made(1).plan(way(recompute)) for recompute in ("none", "stage"))
    for ways in (1, 2):
        quick, slow = (made(seconds, ways=ways).plan(way("host")) for seconds in (3, 4.5))
        copies = [float(span.busy) for span in quick.timeline.spans if span.action.kind in (OFFLOAD, PREFETCH)]
        assert copies == pytest.approx([3.0] * len(copies))
        # Under 1f1b a copy has the time of a forward and a backward: at best 4 / 3 as fast as recomputation.
        assert quick.step_seconds == pytest.approx(plain.step_seconds)
        assert plain.step_seconds < again.step_seconds < slow.step_seconds < 1.6 * plain.step_seconds
    assert (first_stage(plain), first_stage(quick)) == (8, 3)
    assert [round(size / GRAPH) for size in quick.hosted_bytes] == [7, 6, 5, 4, 3, 0, 0, 0]
    found = report(quick)
    assert "schedule 1f1b, recompute host" in found
    assert "pipeline.recompute=host" in overrides(quick, way("none"))
    assert "activations are in CPU memory: 1000 MiB in all, at most 280 MiB (process 0)" in found
    assert limit_of_step(slow).startswith("copies of graphs; ")


def test_they_are_chosen_where_memory_is_short_and_links_are_fast() -> None:
    lean = made(1).plan(way("host")).peak_bytes
    config = way("none").reopened(recompute="auto")
    roomy, tight, slow, tighter = (
        best_plan(made(seconds, limit), config)
        for seconds, limit in ((1, 1 << 40), (1, lean), (4, lean), (1, lean - GRAPH))
    )
    assert roomy.settings.recompute == "none"
    assert tight.settings.recompute == (*["host"] * 5, *["none"] * 3), "the last three keep all of theirs"
    assert tight.step_seconds == pytest.approx(roomy.step_seconds)
    for plan in (slow, tighter):
        assert plan.fits
        assert "host" not in plan.settings.recompute
        assert plan.step_seconds > tight.step_seconds
    # A machine without the memory for them, and a CPU, which is its own host.
    assert "host" not in best_plan(made(1, lean, on_host=900 * MIB), config).settings.recompute
    cpu = made(1, lean)
    cpu.device = replace(cpu.device, has_host=False)
    assert "host" not in best_plan(cpu, config).settings.recompute
    assert first_stage(cpu.plan(way("host"))) >= 8
    assert not any(cpu.plan(way("host")).hosted_bytes)


def test_single_stages_have_them() -> None:
    """Of processes with less memory than others; those recompute that have no room for what travels."""
    lean = made(1).plan(way("host")).peak_bytes
    one = made(1)
    one.memory_bytes = (lean, *[1 << 40] * 7)
    assert best_plan(one, way("none").reopened(recompute="auto")).settings.recompute == ("host", *["none"] * 7)
    one.memory_bytes = (lean, lean - GRAPH, *[1 << 40] * 6)
    tried = [*instead(one.plan(way((3, 2, *["none"] * 6))))]
    assert [plan.settings.recompute[:2] for plan in tried] == [("host", "host"), ("host", 2)]
    assert [plan.fits for plan in tried] == [False, True]
