"""Plans whose graphs wait on the host, which are tried where memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition import stages_of
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.cut import choose_partition
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.settings.pipeline import DecidedConfig


def leaner(planner: Planner, settings: DecidedConfig, strategy: str | Sequence[int]) -> Iterator[Plan]:
    """Yield the plan whose graphs all wait on the host, where the link is fast enough and a split fits."""
    settings = settings.replace(recompute="host")
    if _carries(planner, settings, 0, planner.num_layers - settings.shares_last_layer):
        with suppress(PartitionError):
            yield planner.plan(settings.replace(partition=choose_partition(planner, settings, strategy)))


def instead(plan: Plan) -> Iterator[Plan]:
    """Yield the plan whose graphs wait on the host, in place of recomputation, on the stages whose link is fast enough
    and whose process has room for the graphs that travel."""
    planner, settings = plan.planner, plan.settings
    entries = Recompute.parse(settings.recompute, settings.num_stages).entries
    hosts = {
        number
        for number, start, stop in stages_of(settings.partition)
        if entries[number] != "none" and _carries(planner, settings, start, stop)
    }
    while hosts:
        chosen = tuple("host" if number in hosts else entry for number, entry in enumerate(entries))
        candidate = planner.plan(settings.replace(recompute=chosen))
        yield candidate
        limits, placement = map(planner.limit_of, range(len(candidate.memory))), candidate.timeline.schedule.placement
        every = enumerate(zip(candidate.memory, limits, strict=True))
        full = [process for process, (memory, most) in every if most and memory.total > most]
        if hosts.isdisjoint(crowded := {stage for process in full for stage in placement.stages_of(process)}):
            return
        hosts -= crowded


def _carries(planner: Planner, settings: DecidedConfig, start: int, stop: int) -> bool:
    """Whether a graph of these layers travels to the host, or back, while a micro-batch computes. False on a CPU, and
    beside a mode that excludes it."""
    if not planner.device.has_host or settings.excluding("host_graphs"):
        return False
    sums = planner.sums(settings)
    seconds, num_bytes = sums.seconds(start, stop, "none"), sums.graphs["none"].kept_bytes(start, stop)
    travels = sums.copy_seconds(num_bytes, planner.num_copying(settings.num_processes), ways=2)
    return travels < seconds.forward + seconds.backward
