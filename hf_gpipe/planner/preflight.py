"""A plan beside the machines that it is to run on, before any weight is made: their free memory, and their links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.decide import Planning
from hf_gpipe.planner.links import MeasuredLink, pairs_to_measure
from hf_gpipe.planner.measure import device_memory
from hf_gpipe.planner.network import one_level
from hf_gpipe.planner.times import seconds_text
from hf_gpipe.planner.traffic import bytes_text
from hf_gpipe.recipe import DecidedConfig
from hf_gpipe.recipe.sizes import size_text
from hf_gpipe.runtime.world import World

#: A link that is so much slower than the planner assumed makes its times worthless.
_MUCH_SLOWER = 2.0


def compare_with_machines(planning: Planning, config: DecidedConfig, world: World) -> list[str]:
    """Check the memory that a plan needs, and measure its links. Every process calls it.

    Where all processes are on one machine it costs one small message, unless the configuration asks for
    `measure_links`.

    Returns:
        For each pair of machines with an edge between them a line for people: the measured link, and the planner's.

    Raises:
        UserError: on every process: a machine has less free memory than its processes need. Where the configuration
            says how much `memory` there is, that is believed.
    """
    machines = planning.machines
    if not machines.are_several and not config.measure_links:
        return []
    free = world.gather_objects([free_bytes(device) for device in world.devices])
    peaks, assumed = world.from_reader(lambda: _planned(planning, config), takes_long=True)
    if peaks and config.memory is None:
        is_shared = world.device.type == "cpu"
        if lacking := memory_problems(machines.hosts, free, peaks, is_shared=is_shared):
            raise UserError("; ".join(lacking))
    pairs = pairs_to_measure(world.placement, machines.hosts)
    return [_line(link, assumed) for link in machines.measure(world, pairs)]


def _planned(planning: Planning, config: DecidedConfig) -> tuple[list[int], Level]:
    """The bytes that each process needs, or none where no example of a mini-batch is given; and the assumed link."""
    device = planning.device(config)
    assumed = (planning.machines.cluster(device.link) or one_level(device, 1)).levels[-1]
    if planning.inputs.example is None:
        return [], assumed
    return [process.memory.total for process in planning.planner(config, decides=True).plan(config).processes], assumed


def memory_problems(
    hosts: Sequence[str], free: Sequence[Sequence[int]], peaks: Sequence[int], *, is_shared: bool
) -> list[str]:
    """The machines that have too little free memory, a sentence each.

    Args:
        hosts: the machine of each process.
        free: bytes of each device of each process.
        peaks: bytes that each process needs at the fullest moment of a step.
        is_shared: whether the processes of a machine share its memory, as on the CPU.
    """
    advice = (
        "end what else runs there, use more or smaller stages, recompute more, or set pipeline.memory to what there is "
        "for each process"
    )
    found = []
    if not is_shared:
        for rank, (host, own, need) in enumerate(zip(hosts, free, peaks, strict=True)):
            if need > sum(own):
                found.append(
                    f"machine {host}: process {rank} needs {size_text(need)} by the plan and its GPU has "
                    f"{size_text(sum(own))} free; {advice}"
                )
        return found
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, one in enumerate(hosts) if one == host]
        need, there = sum(peaks[rank] for rank in ranks), min(free[rank][0] for rank in ranks)
        if need > there:
            names = ", ".join(map(str, ranks))
            found.append(
                f"machine {host}: its processes ({names}) need {size_text(need)} by the plan and {size_text(there)} "
                f"are free; {advice}"
            )
    return found


def free_bytes(device: torch.device) -> int:
    """The free memory of a device now; of the CPU what the system can give without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return device_memory(device)


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
