"""Compares a plan with the machines that it is to run on, before any weight is made: free memory and links."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import UserError
from hf_gpipe.job.facts import RankFacts
from hf_gpipe.job.world import MeasuredLink
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.decide import Planning
from hf_gpipe.planner.machines.links import cluster_of, measure, pairs_to_measure
from hf_gpipe.planner.machines.network import one_level
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.settings.pipeline import DecidedConfig
from hf_gpipe.text import bytes_text, seconds_text, size_text

#: The factor by which a link must be slower than the planner assumed to make the planner's times worthless.
_MUCH_SLOWER = 2.0


def compare_with_machines(planning: Planning, config: DecidedConfig, world: Mesh) -> list[str]:
    """Check the memory that a plan needs, and measure its links. Every process calls it.

    It does nothing where all processes are on one machine, unless the configuration asks for `measure_links`.

    Returns:
        A line for each pair of machines with an edge between them: the measured link, and the planner's.

    Raises:
        UserError: on every process: a machine has less free memory than its processes need. Where the configuration
            gives `memory`, that counts as the free memory.
    """
    if not world.has_several_machines and not config.measure_links:
        return []
    peaks, assumed = world.from_main(lambda: _planned(planning, config), tuple[list[int], Level], takes_long=True)
    if peaks and config.memory is None and (lacking := memory_problems(world.ranks, peaks)):
        raise UserError("; ".join(lacking))
    return [_line(link, assumed) for link in measure(world, pairs_to_measure(world.placement, world.hosts))]


def _planned(planning: Planning, config: DecidedConfig) -> tuple[list[int], Level]:
    """The bytes that each process needs, empty where no example of a mini-batch is given, and the assumed link."""
    device = planning.device(config)
    assumed = (cluster_of(planning.world, device.link) or one_level(device, 1)).levels[-1]
    if planning.inputs.example is None:
        return [], assumed
    plan = planning.planner(config, decides=True).plan(config)
    ranks = range(plan.planner.division.num_ranks)
    return [process.memory.total for process in plan.processes for _ in ranks], assumed


def memory_problems(ranks: Sequence[RankFacts], peaks: Sequence[int]) -> list[str]:
    """A sentence for each machine that has too little free memory.

    Args:
        ranks: the facts of each process. On the CPU the processes of a machine share its memory.
        peaks: bytes that each process needs at the peak of a step.
    """
    of_memory: dict[tuple[str, int | None], list[int]] = {}
    for rank, facts in enumerate(ranks):
        of_memory.setdefault((facts.host, rank if facts.devices[0].is_gpu else None), []).append(rank)
    problems = []
    for (host, gpu), own in of_memory.items():
        need, there = sum(peaks[rank] for rank in own), sum(device.free_bytes for device in ranks[own[0]].devices)
        if gpu is None:
            there = min(ranks[rank].devices[0].free_bytes for rank in own)
        if need > there:
            who = f"its processes ({', '.join(map(str, own))}) need" if gpu is None else f"process {gpu} needs"
            has = f"{size_text(there)} are free" if gpu is None else f"its GPU has {size_text(there)} free"
            problems.append(
                f"machine {host}: {who} {size_text(need)} by the plan and {has}; end what else runs there, use more or "
                "smaller stages, recompute more, or set pipeline.memory to what there is for each process"
            )
    return problems


def _line(link: MeasuredLink, assumed: Level) -> str:
    first, second = link.hosts
    where = f"{first} - {second}" if first != second else f"inside {first}"
    text = (
        f"{where}, processes {link.ranks[0]} and {link.ranks[1]}: {bytes_text(link.bytes_per_second)}/s and "
        f"{seconds_text(link.latency_seconds)} for a small message; the planner assumes "
        f"{bytes_text(assumed.bytes_per_second)}/s and {seconds_text(assumed.latency_seconds)}"
    )
    if link.bytes_per_second * _MUCH_SLOWER < assumed.bytes_per_second:
        rate = f"{link.bytes_per_second / 1e6:.0f}MB/s+{link.latency_seconds * 1e6:.0f}us"
        text += f" (plan again with this link, for 2 machines of 4 devices: --devices 2x4@{rate},25GB/s)"
    return text
