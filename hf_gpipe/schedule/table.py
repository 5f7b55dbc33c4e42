"""The schedule table: for every process, the ordered list of actions that it runs in one step.

A table is plain data. The same object is validated, simulated, drawn and executed, and it has a text form that can be
read, compared and edited. GPipe with two stages and two micro-batches, recomputation on:

    schedule: gpipe
    num_stages: 2
    num_micro_batches: 2
    placement: 0 1
    process 0: 0F0 0F1 0R1 0B1 0R0 0B0 0U
    process 1: 1F0 1F1 1R1 1B1 1R0 1B0 1U

`placement` gives the process of each stage; a line `devices: cuda:0 cuda:1` follows it where devices are given. Each
process runs its line from left to right and waits, at an action, for the message which that action receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hf_gpipe.errors import ScheduleError, nearest
from hf_gpipe.schedule.actions import Action, ActionKind, Placement
from hf_gpipe.schedule.validate import check_table, executable_order

__all__ = ["Action", "ActionKind", "Placement", "Schedule"]

_HEADER_KEYS = ("schedule", "num_stages", "num_micro_batches", "placement", "devices")


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline as a table. Immutable and hashable; `validate` says whether it can be run.

    Raises:
        ScheduleError: the name is empty, or would not survive the text form.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """One ordered list a process."""

    def __post_init__(self) -> None:
        if self.name.strip().splitlines() != [self.name]:
            raise ScheduleError(f"schedule name {self.name!r}: use one line of text without spaces at its ends.")

    def __str__(self) -> str:
        return self.text()

    @cached_property
    def is_training(self) -> bool:
        """Whether the table has backward actions."""
        return any(action.kind == ActionKind.BACKWARD for actions in self.actions for action in actions)

    def keeps_graph(self, stage: int, micro_batch: int) -> bool:
        """Whether this forward keeps its autograd graph: a backward follows, and no recomputation lies between."""
        return (stage, micro_batch) in self._graph_keeping_forwards

    @cached_property
    def _graph_keeping_forwards(self) -> frozenset[tuple[int, int | None]]:
        open_forwards: set[tuple[int, int | None]] = set()
        keeping: set[tuple[int, int | None]] = set()
        for actions in self.actions:
            for action in actions:
                where = (action.stage, action.micro_batch)
                if action.kind == ActionKind.FORWARD:
                    open_forwards.add(where)
                elif action.kind == ActionKind.RECOMPUTE:
                    open_forwards.discard(where)
                elif action.kind == ActionKind.BACKWARD and where in open_forwards:
                    keeping.add(where)
        return frozenset(keeping)

    def num_recomputations(self, stage: int) -> int:
        """How many micro-batches a stage recomputes."""
        actions = self.actions[self.placement.processes[stage]]
        return sum(action.stage == stage and action.kind == ActionKind.RECOMPUTE for action in actions)

    def validate(self, rendezvous: bool = False) -> None:
        """Checks that the table is a complete synchronous step which every process can run to its end.

        Args:
            rendezvous: False: a send never waits (what the executor does). True: a send between two processes ends
                only when the receiver has reached the action that consumes it, as with blocking sends of tensors too
                large to buffer. `hf_gpipe.schedule.builders` says which tables pass this stricter test.

        Raises:
            ScheduleError: names the first wrong action and what it lacks.
        """
        check_table(self, rendezvous)

    def executable_order(self) -> Iterator[tuple[int, Action]]:
        """All actions of a valid table, as (process, action), in an order in which each finds what it needs."""
        return executable_order(self)

    def text(self) -> str:
        """The text form shown at the top of this module; `from_text` reads it back exactly."""
        lines = [
            f"schedule: {self.name}",
            f"num_stages: {self.num_stages}",
            f"num_micro_batches: {self.num_micro_batches}",
            f"placement: {' '.join(map(str, self.placement.processes))}",
        ]
        if self.placement.devices is not None:
            lines.append(f"devices: {' '.join(self.placement.devices)}")
        for process, actions in enumerate(self.actions):
            lines.append(f"process {process}: {' '.join(map(str, actions))}".rstrip())
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Reads the text form. Blank lines are ignored; the result is not validated.

        Raises:
            ScheduleError: a line that is no part of a table (named by its number), or a missing line.
        """
        header: dict[str, str] = {}
        actions: list[tuple[Action, ...]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            key, colon, value = (part.strip() for part in line.partition(":"))
            try:
                if key == f"process {len(actions)}" and colon:
                    actions.append(tuple(Action.parse(word) for word in value.split()))
                elif key in _HEADER_KEYS and colon and key not in header:
                    header[key] = value
                else:
                    expected = [name for name in _HEADER_KEYS if name not in header] + [f"process {len(actions)}"]
                    raise ScheduleError(
                        f"found {line.strip()!r}, expected a line that starts with one of "
                        f"{', '.join(f'{name}:' for name in expected)}{nearest(key, expected)}"
                    )
            except ScheduleError as error:
                raise ScheduleError(f"schedule text, line {number}: {error}") from None
        missing = [key for key in _HEADER_KEYS if key not in header and key != "devices"]
        if missing:
            raise ScheduleError(f"schedule text: the line '{missing[0]}:' is missing.")
        devices = tuple(header["devices"].split()) if "devices" in header else None
        return cls(
            name=header["schedule"],
            num_stages=_integers("num_stages", header, 1)[0],
            num_micro_batches=_integers("num_micro_batches", header, 1)[0],
            placement=Placement(_integers("placement", header), devices),
            actions=tuple(actions),
        )


def _integers(key: str, header: dict[str, str], count: int | None = None) -> tuple[int, ...]:
    """The integers of a header line; `count` is how many there must be."""
    words = header[key].split()
    if not all(word.isdecimal() for word in words) or (count is not None and len(words) != count):
        raise ScheduleError(
            f"schedule text: {key}: {header[key]!r} is not {'a list of integers' if count is None else 'an integer'}."
        )
    return tuple(int(word) for word in words)
