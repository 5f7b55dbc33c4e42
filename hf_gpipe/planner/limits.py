"""Limits of memory and speeds of the processes: one number for all processes, or one number for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hf_gpipe.errors import UserError
from hf_gpipe.schedule import Placement
from hf_gpipe.text import size_text

MemoryLimit: TypeAlias = int | tuple[int, ...] | None
"""Bytes that any process may use, or each of them; None: no limit is known."""

#: Devices whose memory differs by less are alike: what is free on equal ones differs a little.
ALIKE = 1.05


def limit_of(memory_bytes: MemoryLimit, process: int) -> int | None:
    """The most bytes that a process may use; None: no limit is known."""
    return memory_bytes[process] if isinstance(memory_bytes, tuple) else memory_bytes


def limits_of(memory_bytes: MemoryLimit, placement: Placement) -> list[int | None]:
    """For each stage the limit of a process that holds it: the smallest of its replicas'."""
    limits = [[limit_of(memory_bytes, process) for process in own] for own in placement.workers]
    return [min((limit for limit in own if limit is not None), default=None) for own in limits]


def speeds_of(speeds: Sequence[float] | None, placement: Placement) -> list[float]:
    """For each stage the relative speed of its slowest replica, for which the others wait."""
    if speeds is None:
        return [1.0] * placement.num_stages
    return [min(speeds[process] for process in own) for own in placement.workers]


def check_processes(memory_bytes: MemoryLimit, speeds: Sequence[float] | None, placement: Placement) -> None:
    """Raise UserError where there are other numbers of limits or speeds than of processes."""
    for name, values in (("memory", memory_bytes), ("speeds", speeds)):
        if isinstance(values, Sequence) and len(values) != placement.num_processes:
            raise UserError(
                f"{name} has {len(values)} entries and the plan has {placement.num_processes} processes; give one "
                "entry for each process."
            )


def limit_text(limit: MemoryLimit) -> str:
    """A limit of memory for people: "80 GiB", or "24 GiB, 12 GiB" for each process."""
    if limit is None:
        return "not known"
    return ", ".join(map(size_text, limit)) if isinstance(limit, tuple) else size_text(limit)
