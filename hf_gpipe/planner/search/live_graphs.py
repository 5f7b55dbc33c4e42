"""The choice of what is recomputed: each stage stores as many graphs as its process has memory for."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.planner.costs.model_costs import InnerRecompute
from hf_gpipe.planner.layout import StageLayers
from hf_gpipe.planner.memory import MemoryBound
from hf_gpipe.planner.plan import Planner
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.settings.pipeline import DecidedConfig


def choose_recompute(planner: Planner, settings: DecidedConfig) -> str | tuple[str | int, ...]:
    """Choose the largest number of stored graphs that fits the planner's limit, for each stage.

    Each graph above the first spares the recomputation of a micro-batch. Where not even one whole graph fits, the stage
    recomputes its blocks instead, if that needs less.

    Args:
        planner: the planner of the model.
        settings: the configuration with its partition; its `recompute` is not read.

    Returns:
        "none" where nothing need be recomputed, else an entry for each stage. Where it does not fit, nothing does.
    """
    layout = planner.layout(settings.replace(recompute="none"))
    bound, placement = MemoryBound(layout), layout.table.placement
    limits = planner.limits_of(placement)
    entries: list[str | int] = ["none"] * settings.num_stages
    for own in dict.fromkeys(map(placement.stages_of, range(placement.num_processes))):
        limit = min((own_limit for stage in own if (own_limit := limits[stage]) is not None), default=None)
        if limit is None:
            return "none"
        for stage, entry in _Room(bound, layout.stages, own).fill(limit).items():
            entries[stage] = entry
    return "none" if set(entries) == {"none"} else tuple(entries)


class _Room:
    """The memory that the stages of one process need, as they are allowed more stored graphs."""

    def __init__(self, bound: MemoryBound, layers: Sequence[StageLayers], own: Sequence[int]) -> None:
        self._bound, self._layers = bound, layers
        self._live = dict.fromkeys(own, 1)
        self._inner: dict[int, InnerRecompute] = dict.fromkeys(own, "none")

    def fill(self, limit_bytes: int) -> dict[int, str | int]:
        """The most stored graphs of each stage, "none" where it may store as many as it ever has, or "block"."""
        for stage in self._live:
            if self._needed() > limit_bytes:
                self._try_blocks(stage)
        # Stages grow in turn, so that no stage recomputes everything while another recomputes nothing.
        growing = [stage for stage in self._live if self._inner[stage] == "none"]
        while growing and self._needed() <= limit_bytes:
            growing = [stage for stage in growing if self._grow(stage, limit_bytes)]
        return {stage: self._entry(stage) for stage in self._live}

    def _grow(self, stage: int, limit_bytes: int) -> bool:
        """Allow a stage one graph more. Returns False where it needs no more, or where there is no room."""
        if self._live[stage] >= self._most(stage):
            return False
        self._live[stage] += 1
        if self._needed() <= limit_bytes:
            return True
        self._live[stage] -= 1
        return False

    def _try_blocks(self, stage: int) -> None:
        """Recompute a stage's blocks, with as many graphs of their inputs as the table has, where this needs less."""
        before = self._needed()
        self._live[stage], self._inner[stage] = self._most(stage), "block"
        if self._needed() >= before:
            self._live[stage], self._inner[stage] = 1, "none"

    def _entry(self, stage: int) -> str | int:
        if self._inner[stage] == "block":
            return "block"
        return "none" if self._live[stage] >= self._most(stage) else self._live[stage]

    def _most(self, stage: int) -> int:
        """The most stored graphs that a stage ever has."""
        return self._bound.most[stage][Held.GRAPH]

    def _needed(self) -> float:
        parts = []
        for stage, live in self._live.items():
            layers = self._layers[stage]._replace(inner=self._inner[stage])
            parts.append(self._bound.parts(stage, layers, live))
        # One action works at a time, so the largest working memory of all stages is enough.
        return sum(kept for kept, _ in parts) + max(working for _, working in parts)
