"""The words of a schedule table: actions on (stage, micro-batch), and the placement of stages on workers.

An action's text is its stage, the letter of its kind (`hf_gpipe.schedule.kinds`) and its micro-batch: "2F0" is the
forward of micro-batch 0 on stage 2, "2U" the optimizer update of stage 2. In an asynchronous table, which has several
steps, "2U5" is the update of step 5, and "2G5" the reduction before it; without a number it is that of step 0.

A stage has for each micro-batch either B, or I and W. The set `split` has the (stage, micro-batch) pairs of I and W; it
tells which action a neighbour's message is from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from hf_gpipe.errors import ScheduleError, one_line
from hf_gpipe.schedule.kinds import BACKWARD, INPUT, KINDS, REDUCE, ActionKind, kind_of

TEXT_VERSION = 5
"""Version of the text of a table and its actions. It changes with a new kind of action or a new meaning of a word.
Version 2 has G and several workers per stage, version 3 I and W, version 4 several steps and the versions of weights,
version 5 chunks of rows; a text of an earlier version means the same in it."""

MOST_PLACES = 100_000
"""The most replicas of all stages together: before anything is made that is as large as a number in a file."""

_NUMBER = r"0|[1-9][0-9]{0,8}"
_ACTION_TEXT = re.compile(rf"({_NUMBER})([A-Z])({_NUMBER})?")


def parse_number(word: str) -> int | None:
    """Parse a word of a table as a number; None if it is not a number."""
    return int(word) if re.fullmatch(_NUMBER, word) else None


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One step of work of a worker on one stage and one micro-batch. Hashable, ordered and immutable.

    Raises:
        ScheduleError: a micro-batch is missing, or given to a reduction or an update.
    """

    kind: ActionKind
    stage: int
    micro_batch: int | None = None
    """Counted over all steps of the table. None for a kind that concerns a whole step, such as a reduction."""
    step: int = 0
    """Of such a kind: the step that it ends."""

    def __post_init__(self) -> None:
        if self.kind.is_of_mini_batch != (self.micro_batch is None) or (self.step and not self.kind.is_of_mini_batch):
            raise ScheduleError(
                f"action {self}: {_letters(is_of_mini_batch=True)} has no micro-batch, and every other kind has one, "
                f"in version {TEXT_VERSION} of the table's text; write for example 2F0 or 2U."
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.label}"

    @property
    def label(self) -> str:
        """The text without the stage: the kind and the number, "F0"."""
        return f"{self.kind}{(self.step or '') if self.micro_batch is None else self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text of `str(action)`.

        Raises:
            ScheduleError: the text is not an action.
        """
        match = _ACTION_TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write the stage, one of {_letters(is_of_mini_batch=False)} and the "
                f"micro-batch, as in 2F0, or the stage, {_letters(is_of_mini_batch=True)} and in a table with several "
                "steps the step, as in 2U or 2U5."
            )
        stage, letter, number = match.groups()
        if letter not in KINDS:
            raise ScheduleError(
                f"{text!r}: {letter} is not a kind of action in version {TEXT_VERSION} of the table's text, which has "
                f"{', '.join(KINDS)}; use one of these."
            )
        kind = kind_of(letter)
        if kind.is_of_mini_batch:
            return cls(kind, int(stage), step=int(number or 0))
        return cls(kind, int(stage), None if number is None else int(number))

    @property
    def reduction(self) -> Action:
        """Of an update: the reduction of its step, if its stage has replicas."""
        return Action(REDUCE, self.stage, step=self.step)

    def source(self, num_stages: int, split: Split = frozenset()) -> Action | None:
        """The neighbouring stage's action whose message this one receives; None if it receives none."""
        return self._neighbour(-self.kind.way, num_stages, split)

    def consumer(self, num_stages: int, split: Split = frozenset()) -> Action | None:
        """The neighbouring stage's action that receives this one's message; None if it sends none."""
        return self._neighbour(self.kind.way, num_stages, split)

    def _neighbour(self, distance: int, num_stages: int, split: Split) -> Action | None:
        stage = self.stage + distance
        if not self.kind.sends or not 0 <= stage < num_stages:
            return None
        if self.kind.takes_gradient:
            return gradient_action(stage, self.micro_batch, split)
        return Action(self.kind, stage, self.micro_batch)


def _letters(*, is_of_mini_batch: bool) -> str:
    """The kinds with a micro-batch, or those of a step, as in "F, R or B"."""
    *others, last = (kind for kind in KINDS.values() if kind.is_of_mini_batch == is_of_mini_batch)
    return f"{', '.join(others)} or {last}"


Split: TypeAlias = AbstractSet[tuple[int, int | None]]
"""The (stage, micro-batch) pairs that have I and W in place of B."""


def gradient_action(stage: int, micro_batch: int | None, split: Split) -> Action:
    """Return I of a (stage, micro-batch) whose backward is split, B of any other."""
    return Action(INPUT if (stage, micro_batch) in split else BACKWARD, stage, micro_batch)


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """Which workers, and which device of each, hold each stage.

    A worker is a process, and has its number. The workers of a stage are its replicas: micro-batch m runs on the
    stage's replica m % r, where r is their number (the round robin of PipeDream's 1F1B-RR, arXiv 1806.03377). Where
    rows are cut into c chunks, each a micro-batch, all of a row run on replica (m // c) % r. Several stages may share
    a worker, in any order.

    Args:
        workers: of each stage its worker, or the workers of its replicas in order.
        devices: the device string of each stage on each of its workers, for example "cuda:1", in the order of `places`;
            None: the process's default device.
        chunks: into how many chunks of tokens each row is cut; those of a row are consecutive micro-batches.

    Raises:
        ScheduleError: no chunk, no stage, a worker without a stage or twice in one, or devices that do not fit the
            places.
    """

    workers: tuple[tuple[int, ...], ...]
    """Of each stage the workers of its replicas. The workers are numbered from 0, and each holds a stage."""
    devices: tuple[str, ...] | None
    chunks: int

    def __init__(
        self, workers: Sequence[int | Sequence[int]], devices: Sequence[str] | None = None, chunks: int = 1
    ) -> None:
        every = tuple((own,) if isinstance(own, int) else tuple(own) for own in workers)
        object.__setattr__(self, "workers", every)
        object.__setattr__(self, "devices", None if devices is None else tuple(devices))
        object.__setattr__(self, "chunks", chunks)
        if chunks < 1:
            raise ScheduleError(f"chunks is {chunks}: a row has at least one chunk.")
        if not every:
            raise ScheduleError("a placement has no stage: name the process of at least one.")
        for stage, own in enumerate(every):
            if not own or len(set(own)) < len(own):
                raise ScheduleError(
                    f"placement: the replicas of stage {stage} are on processes {list(own)}; name at least one, and "
                    "none twice."
                )
        used = {process for own in every for process in own}
        if used != set(range(len(used))):
            raise ScheduleError(
                f"placement {self}: the processes must be numbered from 0 to {len(used) - 1} without a gap, for each "
                "process holds at least one stage."
            )
        if self.devices is None:
            return
        if len(self.devices) != len(self.places):
            raise ScheduleError(
                f"placement: {len(self.devices)} devices for {len(every)} stages with {len(self.places)} replicas in "
                "all; name one device per stage, or one for each of its replicas."
            )
        for device in self.devices:
            if not device or device.split() != [device]:
                raise ScheduleError(f"placement: {device!r} is not a device; write for example 'cpu' or 'cuda:1'.")

    def __str__(self) -> str:
        """The text form: the worker of each stage, or its workers with commas, as in "0,1 2"."""
        return " ".join(",".join(map(str, own)) for own in self.workers)

    @classmethod
    def one_stage_each(cls, num_stages: int, replicas: int | Sequence[int] = 1) -> Placement:
        """Every replica of a stage on a worker of its own.

        Args:
            num_stages: K.
            replicas: the number of replicas. One number D for all stages gives D pipelines of K consecutive workers:
                replica d of stage s is on worker d K + s. Different numbers, one for each stage, put the replicas of a
                stage on consecutive workers, one stage after another.

        Raises:
            ScheduleError: no stage, or numbers of replicas that do not fit.
        """
        counts = replicas_of(num_stages, replicas)
        if len(set(counts)) <= 1:
            return cls.spread(num_stages, num_stages).replicated(counts[0] if counts else 1)
        starts = [sum(counts[:stage]) for stage in range(num_stages)]
        return cls([range(start, start + count) for start, count in zip(starts, counts, strict=True)])

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

    @classmethod
    def v_shaped(cls, num_stages: int, num_processes: int) -> Placement:
        """Stages in the shape of a V: process k of P has the stages k and 2P-1-k, so the last one has two neighbours.

        Raises:
            ScheduleError: the number of stages is not twice the number of processes.
        """
        if num_processes < 1 or num_stages != 2 * num_processes:
            raise ScheduleError(
                f"{num_stages} stages cannot be placed in a V on {num_processes} processes: every process holds two. "
                "Let num_stages be twice the number of processes."
            )
        return cls((*range(num_processes), *reversed(range(num_processes))))

    def replicated(self, times: int) -> Placement:
        """D copies of this placement: the workers of copy d follow those of copy d - 1, in the same order.

        Neighbouring stages so keep neighbouring workers. With several replicas already, each has D copies.

        Raises:
            ScheduleError: `times` is below 1.
        """
        if times < 1:
            raise ScheduleError(f"{times} replicas of a stage: every stage has at least one.")
        starts = range(0, times * self.num_processes, self.num_processes)
        workers = [[start + process for start in starts for process in own] for own in self.workers]
        if self.devices is None:
            return Placement(workers, chunks=self.chunks)
        devices = dict(zip(self.places, self.devices, strict=True))
        copied = [devices[stage, process] for stage, own in enumerate(self.workers) for _ in starts for process in own]
        return Placement(workers, copied, self.chunks)

    @property
    def num_stages(self) -> int:
        return len(self.workers)

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return max(map(max, self.workers)) + 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(map(len, self.workers))

    @property
    def has_replicas(self) -> bool:
        """Whether any stage has more than one."""
        return max(self.replicas) > 1

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Every (stage, worker that holds it), by stage and then by replica."""
        return tuple((stage, process) for stage, own in enumerate(self.workers) for process in own)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process of each stage, in a placement without replicas.

        Raises:
            ScheduleError: a stage has several.
        """
        if self.has_replicas:
            raise ScheduleError(f"placement {self}: a stage has several processes; ask for `workers`.")
        return tuple(own[0] for own in self.workers)

    def process_of(self, action: Action) -> int:
        """The worker that runs an action, and so sends and receives its messages.

        Raises:
            ScheduleError: a reduction or update of a stage with replicas, which stands on all of them.
        """
        own = self.workers[action.stage]
        if len(own) == 1:
            return own[0]
        if action.micro_batch is None:
            raise ScheduleError(f"{action} stands on each of the processes {list(own)}; ask for `workers`.")
        return own[action.micro_batch // self.chunks % len(own)]

    def is_local(self, action: Action, other: Action) -> bool:
        """Whether two actions run in one process and on one device, so that no message travels between them."""
        process = self.process_of(action)
        if process != self.process_of(other):
            return False
        return self.device_of(action.stage, process) == self.device_of(other.stage, process)

    def device_of(self, stage: int, process: int) -> str | None:
        """The device string of a stage in one of its workers; None: the process's default device."""
        return None if self.devices is None else self.devices[self.places.index((stage, process))]

    def place_of(self, process: int, action: Action) -> tuple[int, str | None]:
        """The device that an action of a process runs on, as (process, device)."""
        return process, self.device_of(action.stage, process)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a worker holds, ascending."""
        return tuple(stage for stage, own in enumerate(self.workers) if process in own)

    def micro_batches_of(self, stage: int, process: int, num_micro_batches: int) -> Sequence[int]:
        """The micro-batches, of so many, that a stage runs in one of its workers; it may be none."""
        own, chunks = self.workers[stage], self.chunks
        if chunks == 1:
            return range(own.index(process), num_micro_batches, len(own))
        return [m for m in range(num_micro_batches) if m // chunks % len(own) == own.index(process)]

    def backward_order(self, micro_batches: Sequence[int]) -> list[int]:
        """Micro-batches in the order of their backwards: the rows in order, of each row the last chunk first."""
        return sorted(micro_batches, key=lambda m: (m // self.chunks, -m))

    @property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """Where two workers exchange a micro-batch: (stage, its worker, the worker of the next stage), ascending.

        A worker that holds both stages is in it too: its edge is within the process.
        """
        found = set()
        for stage, (own, following) in enumerate(pairwise(self.workers)):
            # The replicas of both stages are the same again after so many micro-batches.
            for micro_batch in range(math.lcm(len(own), len(following))):
                found.add((stage, own[micro_batch % len(own)], following[micro_batch % len(following)]))
        return tuple(sorted(found))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The workers that reduce gradients together: of each stage with replicas, each group once."""
        return tuple(dict.fromkeys(own for own in self.workers if len(own) > 1))


def replicas_of(num_stages: int, replicas: int | Sequence[int]) -> tuple[int, ...]:
    """The number of replicas of each stage, from one number for all or one for each.

    Raises:
        ScheduleError: a number below 1, or not one for each stage, or too many of them.
    """
    if num_stages * (replicas if isinstance(replicas, int) else 1) > MOST_PLACES:
        raise ScheduleError(
            f"num_stages is {num_stages}, and replicas is {one_line(str(replicas), 60)}: over {MOST_PLACES} in all; "
            "use fewer."
        )
    counts = (replicas,) * num_stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != num_stages:
        raise ScheduleError(
            f"replicas {list(counts)} has {len(counts)} entries for {num_stages} stages; give one for each, or one "
            "number for all."
        )
    if any(count < 1 for count in counts):
        raise ScheduleError(f"replicas is {replicas}: every stage has at least one replica.")
    return counts
