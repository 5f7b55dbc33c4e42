"""The cost of graphs on the host: seconds of their copies, and bytes of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_gpipe.modes.host_graphs.table import AWAY, OFFLOAD, PREFETCH
from hf_gpipe.planner.costs.stage_costs import StageCosts, StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import ActionKind
from hf_gpipe.schedule.occupancy import occupancy


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of O and P of each stage: all that its graph keeps travels, in both directions at once."""
    sums = layout.sums
    graphs = [sums.copy_seconds(sums.graph_bytes(stage), layout.num_updating, ways=2) for stage in layout.stages]
    return {OFFLOAD: graphs, PREFETCH: graphs}


def amounts(sums: StageCosts, stage: StageLayers, of_graph: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    """The bytes on the device of a graph that is away: none, except on a CPU, which is its own host."""
    return {AWAY: {} if sums.device.has_host else of_graph}


def on_host(layout: Layout, timeline: Timeline) -> Mapping[str, Sequence[int]]:
    """The graphs that are away."""
    table, sums = layout.table, layout.sums
    if OFFLOAD not in table.kinds or not sums.device.has_host:
        return {}
    sizes = []
    for worker in range(table.placement.num_processes):
        own = table.placement.stages_run_by(worker)
        away = {number: {AWAY: {"away": sums.graph_bytes(layout.stages[number])}} for number in own}
        levels = occupancy(timeline, away, worker)
        sizes.append(round(max((level.get("away", 0.0) for _, level in levels), default=0.0)))
    return {"activations": sizes}
