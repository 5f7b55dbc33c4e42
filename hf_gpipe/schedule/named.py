"""The schedules by name: how their tables are made. `hf_gpipe.schedule.builders` has those of the core, and modes add
theirs (`hf_gpipe.modes`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits
from hf_gpipe.schedule.table import Schedule

Builder: TypeAlias = Callable[[int, Placement, Limits], list[list[Action]]]
"""(num_micro_batches, placement, limits of stored graphs) -> each process's actions, without G and U."""

WindowBuilder: TypeAlias = Callable[[tuple[int, ...], Placement, Limits], Schedule]
"""(number of micro-batches of each step, placement, limits of stored graphs) -> the table of a window: several steps,
after each of which each stage updates its weights by itself."""


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule, which has either `orders` or `window`.

    Attributes:
        orders: makes the orders of a step.
        window: makes the table of a window.
        place: (num_stages, num_processes) -> where its stages are.
        is_shared: whether its stages are shared by the workers of a pipeline (`Placement.is_shared`).
        is_for_training: False: it evaluates.
        takes_groups: whether it has an order for groups of micro-batches (`hf_gpipe.schedule.groups`).
        text: what it is, for the help of the key that names it.
        same_replicas: why all stages have one number of replicas, after the words "every micro-batch"; empty: they
            need not.
    """

    orders: Builder | None = None
    window: WindowBuilder | None = None
    place: Callable[[int, int], Placement] = Placement.spread
    is_shared: bool = False
    is_for_training: bool = True
    takes_groups: bool = True
    text: str = ""
    same_replicas: str = ""


LONGEST_WINDOW = 128
"""The most steps of a window that is run: of K stages they wait K-1 micro-batches' time at its ends."""

#: All schedules, in the order in which messages name them.
SCHEDULES: dict[str, NamedSchedule] = {}


def training_schedules() -> Iterator[str]:
    """Yield the schedules of one step, after which all stages update together."""
    return (name for name, named in SCHEDULES.items() if named.is_for_training and named.window is None)


def window_schedules() -> Iterator[str]:
    """Yield the schedules whose tables are windows."""
    return (name for name, named in SCHEDULES.items() if named.window is not None)


def has_windows(name: str) -> bool:
    """Whether the tables of a schedule, or of a file, are windows; False of an unknown name."""
    return name in SCHEDULES and SCHEDULES[name].window is not None
