"""The cost of graphs on the host: seconds of their copies, and bytes of memory."""

from __future__ import annotations

from collections.abc import Mapping

from hf_gpipe.modes.host_graphs.table import AWAY, OFFLOAD, PREFETCH
from hf_gpipe.planner.costs.stage_costs import StageCosts, StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.schedule.kinds import ActionKind


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of O and P of each stage: all that its graph keeps travels, in both directions at once."""
    sums, count = layout.sums, layout.processes.num_copying(layout.table.placement.num_processes)
    graphs = [sums.copy_seconds(sums.graph_bytes(stage), count, ways=2) for stage in layout.stages]
    return {OFFLOAD: graphs, PREFETCH: graphs}


def amounts(sums: StageCosts, stage: StageLayers, of_graph: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    """The bytes on the device of a graph that is away: none, except on a CPU, which is its own host."""
    return {AWAY: {} if sums.device.is_asynchronous else of_graph}


def host_amounts(sums: StageCosts, stage: StageLayers) -> dict[str, float]:
    """The bytes in CPU memory of a graph that is away."""
    return {AWAY: sums.graph_bytes(stage)}
