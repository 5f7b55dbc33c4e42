"""A plan beside the machines that it is to run on, before any weight is made: their free memory, and their links."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.planner.decide import Planning
from hf_gpipe.planner.devices import Link
from hf_gpipe.planner.measure import device_memory, this_machine
from hf_gpipe.planner.times import seconds_text
from hf_gpipe.planner.traffic import bytes_text
from hf_gpipe.recipe import DecidedConfig
from hf_gpipe.recipe.sizes import size_text
from hf_gpipe.runtime.processes import Processes
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.schedule.actions import Placement

#: Messages grow until one takes so long, or has the last size.
_LONG_ENOUGH_SECONDS = 0.05
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 1 << 16, 1 << 25, 8
_NUM_TRIPS = 5
#: A link that is so much slower than the planner assumed makes its times worthless.
_MUCH_SLOWER = 2.0


@dataclass(frozen=True)
class MeasuredLink:
    """The link between two machines, or between two processes of one.

    Attributes:
        hosts: the names of the machines.
        ranks: the two processes that have measured it.
        bytes_per_second: in one direction.
        latency_seconds: of a small message.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    bytes_per_second: float
    latency_seconds: float


def compare_with_machines(planning: Planning, config: DecidedConfig, topology: Topology) -> list[str]:
    """Check the memory that a plan needs, and measure its links. Every process calls it.

    Where all processes are on one machine it costs one small message, unless the configuration asks for
    `measure_links`.

    Returns:
        For each pair of machines with an edge between them a line for people: the measured link, and the planner's.

    Raises:
        UserError: on every process: a machine has less free memory than its processes need. Where the configuration
            says how much `memory` there is, that is believed.
    """
    hosts = topology.gather_objects(socket.gethostname())
    if len(set(hosts)) == 1 and not config.measure_links:
        return []
    free = topology.gather_objects([free_bytes(device) for device in topology.devices])
    peaks, assumed = topology.from_reader(lambda: _planned(planning, config), takes_long=True)
    is_shared = topology.device.type == "cpu"
    if peaks and config.memory is None and (lacking := memory_problems(hosts, free, peaks, is_shared=is_shared)):
        raise UserError("; ".join(lacking))
    pairs = pairs_to_measure(topology.placement, hosts)
    return [_line(link, assumed) for link in measure_links(topology, hosts, pairs)]


def _planned(planning: Planning, config: DecidedConfig) -> tuple[list[int], Link]:
    """The bytes that each process needs, or none where no example of a mini-batch is given; and the assumed link."""
    if planning.inputs.example is None:
        return [], this_machine(planning.processes.device).link
    planner = planning.planner(config)
    return [process.memory.total for process in planner.plan(config).processes], planner.device.link


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


def pairs_to_measure(placement: Placement, hosts: Sequence[str]) -> list[tuple[int, int]]:
    """Two processes for each pair of machines between which a plan sends; on one machine alone, two of its processes.

    Args:
        placement: its edges, and its reductions in a ring of each stage's replicas.
        hosts: the machine of each process.
    """
    sending = {(worker, following) for _, worker, following in placement.edges if worker != following}
    for group in placement.groups:
        sending |= set(zip(group, (*group[1:], group[0]), strict=True))
    is_one = len(set(hosts)) == 1
    first: dict[frozenset[str], tuple[int, int]] = {}
    for pair in sorted(tuple(sorted(pair)) for pair in sending):
        ends = frozenset(hosts[rank] for rank in pair)
        if is_one or len(ends) > 1:
            first.setdefault(ends, (pair[0], pair[1]))
    return list(first.values())


def measure_links(processes: Processes, hosts: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[MeasuredLink]:
    """Measure the links between pairs of processes, one after the other. Every process calls it.

    Args:
        processes: of the pipeline.
        hosts: the machine of each process.
        pairs: the processes at the ends of each link.
    """
    mine = {}
    for first, second in pairs:
        if processes.rank == first:
            mine[first, second] = _send_and_measure(processes, second)
        elif processes.rank == second:
            _answer(processes, first)
        processes.barrier()
    measured = {pair: value for one in processes.gather_objects(mine) for pair, value in one.items()}
    return [MeasuredLink((hosts[pair[0]], hosts[pair[1]]), pair, *measured[pair]) for pair in pairs]


def _send_and_measure(processes: Processes, peer: int) -> tuple[float, float]:
    """Bytes per second and seconds of latency to a process that calls `_answer`."""
    device, group = processes.device, processes.group_on(processes.device)
    token = torch.zeros(1, dtype=torch.int64, device=device)

    def trip(size: int) -> float:
        """Seconds until a message of so many bytes has arrived and the answer is here."""
        content = torch.zeros(size, dtype=torch.uint8, device=device)
        dist.send(torch.tensor([size], device=device), group_dst=peer, group=group)
        dist.recv(token, group_src=peer, group=group)
        token.item()  # on a GPU only this waits for the message
        start = time.perf_counter()
        dist.send(content, group_dst=peer, group=group)
        dist.recv(token, group_src=peer, group=group)
        token.item()
        return time.perf_counter() - start

    # The first message connects the two.
    round_trip = median([trip(1) for _ in range(_NUM_TRIPS)][1:])
    size = _FIRST_BYTES
    while (seconds := trip(size)) < _LONG_ENOUGH_SECONDS and size < _LAST_BYTES:
        size *= _GROWTH
    dist.send(torch.tensor([0], device=device), group_dst=peer, group=group)
    return size / max(seconds - round_trip / 2, 1e-9), round_trip / 2


def _answer(processes: Processes, peer: int) -> None:
    device, group = processes.device, processes.group_on(processes.device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(token, group_src=peer, group=group)
        size = int(token.item())
        if size == 0:
            return
        dist.send(token, group_dst=peer, group=group)
        dist.recv(torch.empty(size, dtype=torch.uint8, device=device), group_src=peer, group=group)
        dist.send(token, group_dst=peer, group=group)


def _line(link: MeasuredLink, assumed: Link) -> str:
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
