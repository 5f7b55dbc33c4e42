"""The cost of weights that visit: seconds of their copies. `StageCosts.hosted` has their sizes."""

from __future__ import annotations

from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.planner.layout import Layout
from hf_gpipe.schedule.kinds import ActionKind


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of L and D of each stage: all its weights that visit come, and what is trained goes back."""
    sums, placement = layout.sums, layout.table.placement
    count, visitors = layout.processes.num_copying(placement.num_processes), layout.settings.visits.offload_weights
    hosted = [sums.hosted(*stage.run, visitors, is_shared=placement.is_shared) for stage in layout.stages]
    return {
        LOAD: [sums.copy_seconds(own.num_bytes, count) for own in hosted],
        DROP: [sums.copy_seconds(own.trainable_bytes, count) for own in hosted],
    }
