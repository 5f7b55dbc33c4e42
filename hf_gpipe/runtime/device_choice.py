"""The devices of each process: chosen by all processes together, so that no two of them share a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hf_gpipe.errors import UserError
from hf_gpipe.job.world import World
from hf_gpipe.settings.pipeline import PipelineConfig

DeviceChoice: TypeAlias = torch.device | str | Sequence[str] | None
"""Where a process computes: a device, a list of devices for its stages, or None to choose one."""


def world_for(config: PipelineConfig, device: DeviceChoice = None) -> World:
    """The processes of the running job and their devices. Every process must call it.

    Args:
        config: its `device` or `devices` count where `device` is None; the numbers of processes and stages are checked.
        device: where this process computes; None or "auto": a CUDA device of its own where there is one, else the CPU;
            "cuda": a CUDA device of its own. A list names the devices of all processes of this machine, each of which
            takes an equal part, in order.

    Raises:
        UserError: on every process: the job has another number of processes, or more than stages; or a device does not
            exist, or two processes share a GPU.
    """
    alone = World.current()
    count = config.division.workers_among(alone.num_processes)
    if config.num_processes not in (None, count):
        raise UserError(
            f"num_processes is {config.num_processes} and {count} are running; leave it out, or start "
            f"{config.num_processes}"
        )
    if not config.is_mesh_open and count > config.places:
        raise UserError(
            f"{count} processes were started for num_stages={config.num_stages} and replicas={config.replicas}: a "
            f"process holds at least one stage; start at most {config.places}, or raise num_stages or replicas"
        )
    chosen = device if device is not None else config.devices or config.device
    wishes = alone.from_each(lambda: _DeviceRequest.of(chosen), _DeviceRequest)
    devices = _assign(wishes, alone.hosts)[alone.rank]
    if devices[0].startswith("cuda"):
        torch.cuda.set_device(torch.device(devices[0]))
    return alone.on(devices)


@dataclass(frozen=True)
class _DeviceRequest:
    """The devices that a process asks for, and those that it can see.

    Attributes:
        names: devices; "cuda" without a number stands for any GPU.
        is_list: whether `names` are those of all processes of the machine.
        gpus: the UUIDs of the GPUs that it sees, by their number.
    """

    names: tuple[str, ...]
    is_list: bool
    gpus: tuple[str, ...]

    @classmethod
    def of(cls, choice: DeviceChoice) -> _DeviceRequest:
        """Raises UserError for a device that does not exist."""
        is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
        given: Any = choice if is_list else [choice]
        names = tuple(map(_named, given))
        gpus: tuple[str, ...] = ()
        if any(name.startswith("cuda") for name in names):
            # Reading properties opens no context, which would take memory on each device.
            properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            gpus = tuple(str(gpu.uuid) for gpu in properties)
        for name in names:
            number = torch.device(name).index
            if name.startswith("cuda:") and number >= len(gpus):
                raise UserError(f"device {name!r} was asked for and torch finds {len(gpus)} CUDA devices")
        return cls(names, is_list, gpus)


def _named(device: torch.device | str | None) -> str:
    """The name of a device that torch knows; "cuda" or "cpu" for "auto"."""
    if device is None or str(device) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {str(device)!r} is not one of torch's; use cpu or cuda") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {str(device)!r} was asked for and torch finds no CUDA device; use device: cpu")
    return str(chosen)


def _assign(wishes: Sequence[_DeviceRequest], hosts: Sequence[str]) -> list[list[str]]:
    """The names of the devices of each process, in order of rank.

    Raises:
        UserError: two processes would share a GPU, or compute on different kinds of devices.
    """
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # NCCL's own variable (docs/gpu.md)
    taken: dict[tuple[str, str], int] = {}
    assigned: list[list[str]] = []
    for rank, wish in enumerate(wishes):
        assigned.append([])
        for name in _own_names(rank, wishes, hosts):
            if name.startswith("cuda"):
                host = hosts[rank]
                # The first GPU that no process has; without one, the first.
                free = (number for number, gpu in enumerate(wish.gpus) if (host, gpu) not in taken)
                number = next(free, 0) if name == "cuda" else int(name.removeprefix("cuda:"))
                other = taken.setdefault((host, wish.gpus[number]), rank)
                if other != rank and not may_share:
                    raise UserError(
                        f"processes {other} and {rank} would share one GPU: cuda:{number} of process {rank} on host "
                        f"{host} ({wish.gpus[number]}), where it sees {len(wish.gpus)}; set CUDA_VISIBLE_DEVICES "
                        "for each process, start fewer processes (a process can hold several stages), or use "
                        "device: cpu"
                    )
                name = f"cuda:{number}"
            assigned[rank].append(name)
    _check_kinds(assigned)
    return assigned


def _own_names(rank: int, wishes: Sequence[_DeviceRequest], hosts: Sequence[str]) -> tuple[str, ...]:
    """The devices that a process asks for itself: of a list for the whole machine its part."""
    mine = wishes[rank]
    if not mine.is_list:
        return mine.names
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    share, rest = divmod(len(mine.names), len(neighbours))
    if rest or not share:
        raise UserError(
            f"devices {list(mine.names)}: {len(mine.names)} cannot be shared out evenly between the {len(neighbours)} "
            "processes of this machine; name as many for each"
        )
    first = share * neighbours.index(rank)
    return mine.names[first : first + share]


def _check_kinds(assigned: Sequence[Sequence[str]]) -> None:
    """Raise UserError where processes compute on different kinds of devices: no message can go between those."""
    kinds = {torch.device(name).type: rank for rank, names in enumerate(assigned) for name in names}
    if len(assigned) > 1 and len(kinds) > 1:
        processes = " and ".join(f"process {rank} on {kind}" for kind, rank in sorted(kinds.items()))
        raise UserError(
            f"{processes}: the processes of a pipeline exchange tensors over one kind of network, so all compute on "
            "one kind of device; use device: cpu, give every process a GPU, or put all stages into one process"
        )
