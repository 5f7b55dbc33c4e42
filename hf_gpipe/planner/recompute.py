"""What each stage recomputes: as little as its process's memory allows."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.planner.bounds import Alive, alive, stage_parts
from hf_gpipe.planner.costs import InnerRecompute
from hf_gpipe.planner.memory import StageLayers
from hf_gpipe.planner.plan import Planner, stage_layers
from hf_gpipe.recipe import DecidedConfig as Settings
from hf_gpipe.recipe import RecomputeChoice


def choose_recompute(planner: Planner, settings: Settings) -> RecomputeChoice:
    """For each stage the largest number of live graphs that fits the planner's limit.

    Each graph above the first spares the recomputation of a micro-batch. Where not even one whole graph fits, the stage
    recomputes its blocks instead, if that needs less.

    Args:
        planner: of the model.
        settings: with the partition; their recompute is not read.

    Returns:
        "none" where nothing need be recomputed, else an entry for each stage. It may not fit: then nothing does.
    """
    if planner.memory_bytes is None:
        return "none"
    table = planner.table(
        settings.schedule, settings.num_stages, settings.num_micro_batches, "none", settings.num_processes
    )
    counts = alive(planner, settings, "none")
    entries: list[str | int] = ["none"] * settings.num_stages
    for process in range(table.placement.num_processes):
        room = _Room(planner, settings, counts, table.placement.stages_of(process))
        for stage, entry in room.fill(planner.memory_bytes).items():
            entries[stage] = entry
    return "none" if set(entries) == {"none"} else tuple(entries)


class _Room:
    """What the stages of one process need, as they are allowed more live graphs."""

    def __init__(self, planner: Planner, settings: Settings, counts: Sequence[Alive], own: tuple[int, ...]) -> None:
        self._planner, self._settings, self._counts = planner, settings, counts
        self._layers = stage_layers(settings)
        self._live = dict.fromkeys(own, 1)
        self._inner: dict[int, InnerRecompute] = dict.fromkeys(own, "none")

    def fill(self, limit_bytes: int) -> dict[int, str | int]:
        """The most live graphs of each stage; "none" where that is as many as it ever has, or "block"."""
        for stage in self._live:
            if self._needed() > limit_bytes:
                self._try_blocks(stage)
        # In turn, so that no stage recomputes everything while another recomputes nothing.
        growing = [stage for stage in self._live if self._inner[stage] == "none"]
        while growing and self._needed() <= limit_bytes:
            growing = [stage for stage in growing if self._grow(stage, limit_bytes)]
        return {stage: self._entry(stage) for stage in self._live}

    def _grow(self, stage: int, limit_bytes: int) -> bool:
        """Allow a stage one graph more; False where it needs none, or there is no room."""
        if self._live[stage] >= self._counts[stage].graphs:
            return False
        self._live[stage] += 1
        if self._needed() <= limit_bytes:
            return True
        self._live[stage] -= 1
        return False

    def _try_blocks(self, stage: int) -> None:
        """Recompute a stage's blocks, with as many graphs of their inputs as the table has, where this needs less."""
        before = self._needed()
        self._live[stage], self._inner[stage] = self._counts[stage].graphs, "block"
        if self._needed() >= before:
            self._live[stage], self._inner[stage] = 1, "none"

    def _entry(self, stage: int) -> str | int:
        if self._inner[stage] == "block":
            return "block"
        return "none" if self._live[stage] >= self._counts[stage].graphs else self._live[stage]

    def _needed(self) -> float:
        parts = []
        for stage, live in self._live.items():
            counts = self._counts[stage]
            layers = StageLayers(self._layers[stage].start, self._layers[stage].stop, self._inner[stage])
            of_table = Alive(counts.boundaries, live, counts.gradients)
            parts.append(stage_parts(self._planner, self._settings, of_table, layers))
        # One action works at a time, so the largest working memory of all stages is enough.
        return sum(kept for kept, _ in parts) + max(working for _, working in parts)
