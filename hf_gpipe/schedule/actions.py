"""The words of a schedule table: actions on (stage, micro-batch), and the placement of stages on processes.

An action's text is its stage, the letter of its kind and its micro-batch: "2F0" is the forward of micro-batch 0 on
stage 2, "2U" the optimizer update of stage 2. What an action needs before it may run, for stage s and micro-batch m:

    F  the boundary that F of stage s-1 sent (stage 0 reads the batch)
    R  F of the same (s, m). It runs the stage's forward again with gradients and does not need the incoming gradient,
       so a process may run it while it would otherwise wait.
    B  R of the same (s, m), or F where the table has no R; and the gradient that B of stage s+1 sent (the last stage
       starts from its own loss)
    U  B of every micro-batch on the stage
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from hf_gpipe.errors import ScheduleError


class ActionKind(StrEnum):
    """The kind of work that a process does with a stage."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    UPDATE = "U"

    @property
    def word(self) -> str:
        """The kind in full, in lower case."""
        return self.name.lower()


TEXT_VERSION = 1
"""Version of the text of a table and its actions. It changes with a new kind of action or a new meaning of a word."""

_NUMBER = r"0|[1-9][0-9]{0,8}"
_ACTION_TEXT = re.compile(rf"({_NUMBER})([A-Z])({_NUMBER})?")


def parse_number(word: str) -> int | None:
    """Parse a word of a table as a number; None if it is not a number."""
    return int(word) if re.fullmatch(_NUMBER, word) else None


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step of work of a process on one stage and one micro-batch. Hashable, ordered and immutable.

    Raises:
        ScheduleError: a micro-batch is missing, or given to an update.
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None = None
    """None for an update only: it concerns the whole mini-batch."""

    def __post_init__(self) -> None:
        if (self.kind == ActionKind.UPDATE) != (self.micro_batch is None):
            raise ScheduleError(
                f"action {self}: an update (U) stands without a number after it, and every other kind with its "
                f"micro-batch, in version {TEXT_VERSION} of the table's text; write for example 2F0 or 2U."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text of `str(action)`.

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _ACTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write the stage, one of F, R or B and the micro-batch, as in 2F0, "
                "or the stage and U, as in 2U."
            )
        stage, kind, micro_batch = match.groups()
        if kind not in list(ActionKind):
            raise ScheduleError(
                f"{text!r}: {kind} is not a kind of action in version {TEXT_VERSION} of the table's text, which has "
                f"{', '.join(ActionKind)}; use one of these."
            )
        return cls(ActionKind(kind), int(stage), None if micro_batch is None else int(micro_batch))

    def source(self, num_stages: int) -> Action | None:
        """The neighbouring stage's action whose message this one receives; None if it receives none."""
        if self.kind == ActionKind.FORWARD and self.stage > 0:
            return Action(ActionKind.FORWARD, self.stage - 1, self.micro_batch)
        if self.kind == ActionKind.BACKWARD and self.stage < num_stages - 1:
            return Action(ActionKind.BACKWARD, self.stage + 1, self.micro_batch)
        return None

    def consumer(self, num_stages: int) -> Action | None:
        """The neighbouring stage's action that receives this one's message; None if it sends none."""
        if self.kind == ActionKind.FORWARD and self.stage < num_stages - 1:
            return Action(ActionKind.FORWARD, self.stage + 1, self.micro_batch)
        if self.kind == ActionKind.BACKWARD and self.stage > 0:
            return Action(ActionKind.BACKWARD, self.stage - 1, self.micro_batch)
        return None


@dataclass(frozen=True, slots=True)
class Placement:
    """Which process, and which device of it, holds each stage. Several stages may share a process, in any order.

    Raises:
        ScheduleError: no stage, a process without a stage, or a list of devices that does not fit the stages.
    """

    processes: tuple[int, ...]
    """The process of each stage. The processes are numbered from 0, and each holds a stage."""
    devices: tuple[str, ...] | None = None
    """The device string of each stage, for example "cuda:1"; None: the process's default device."""

    def __post_init__(self) -> None:
        if not self.processes:
            raise ScheduleError("a placement has no stage: name the process of at least one.")
        used = set(self.processes)
        if used != set(range(len(used))):
            raise ScheduleError(
                f"placement {self.processes}: the processes must be numbered from 0 to {len(used) - 1} without a gap, "
                "for each process holds at least one stage."
            )
        if self.devices is None:
            return
        if len(self.devices) != len(self.processes):
            raise ScheduleError(
                f"placement: {len(self.devices)} devices for {len(self.processes)} stages; name one device per stage."
            )
        for device in self.devices:
            if not device or device.split() != [device]:
                raise ScheduleError(f"placement: {device!r} is not a device; write for example 'cpu' or 'cuda:1'.")

    @classmethod
    def one_stage_each(cls, num_stages: int) -> Placement:
        """Stage s in process s."""
        return cls.spread(num_stages, num_stages)

    @classmethod
    def spread(cls, num_stages: int, num_processes: int) -> Placement:
        """Consecutive stages in each process; the numbers of stages differ by at most one, the larger ones first.

        Raises:
            ScheduleError: fewer stages than processes, or no process.
        """
        if not 1 <= num_processes <= num_stages:
            raise ScheduleError(
                f"{num_stages} stages cannot be spread over {num_processes} processes: every process needs a stage. "
                f"Use between 1 and num_stages processes."
            )
        base, extra = divmod(num_stages, num_processes)
        return cls(tuple(p for p in range(num_processes) for _ in range(base + (p < extra))))

    @classmethod
    def interleaved(cls, num_stages: int, num_processes: int) -> Placement:
        """Stages assigned in turn: stage s in process s % num_processes, the same number in each.

        Raises:
            ScheduleError: no process, or a number of stages that is not a multiple of the number of processes.
        """
        if num_processes < 1 or num_stages < 1 or num_stages % num_processes:
            raise ScheduleError(
                f"{num_stages} stages cannot be interleaved over {num_processes} processes: every process holds the "
                "same number of them. Let num_stages be a multiple of the number of processes."
            )
        return cls(tuple(stage % num_processes for stage in range(num_stages)))

    @property
    def num_stages(self) -> int:
        return len(self.processes)

    @property
    def num_processes(self) -> int:
        return max(self.processes) + 1

    def process_of(self, action: Action) -> int:
        """The process that runs an action, and so sends and receives its messages."""
        return self.processes[action.stage]

    def is_local(self, action: Action, other: Action) -> bool:
        """Whether two actions run in one process and on one device, so that no message travels between them."""
        same_device = self.devices is None or self.devices[action.stage] == self.devices[other.stage]
        return same_device and self.process_of(action) == self.process_of(other)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a process holds, ascending."""
        return tuple(stage for stage, home in enumerate(self.processes) if home == process)
