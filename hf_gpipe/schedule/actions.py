"""The actions of a schedule table, each on a (stage, micro-batch).

An action's text is its stage, the letter of its kind (`hf_gpipe.schedule.kinds`) and its micro-batch: "2F0" is the
forward of micro-batch 0 on stage 2, "2U" the optimizer update of stage 2. In a window, which has several steps,
"2U5" is the update of step 5, and "2G5" the reduction before it; without a number both belong to step 0. Kinds may be
numbered by themselves (`ActionKind.is_numbered`).

A stage has for each micro-batch either B, or I and W. The set `split` has the (stage, micro-batch) pairs of I and W;
these pairs tell which action a neighbour's message is from.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.kinds import (
    BACKWARD,
    INPUT,
    KINDS,
    ActionKind,
    kind_of,
)

TEXT_VERSION = 10
"""Version of the text of a table and its actions. It changes with a new kind of action or a new meaning of a word.
Version 2 has G and several workers per stage, version 3 I and W, version 4 several steps and the versions of weights,
version 5 groups, version 6 L and D, version 7 S and T, version 8 shared stages, version 9 H, O and P,
version 10 A; a text of an earlier version means the same in it."""

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
    """The step that an action without a micro-batch ends, or the visit that it begins or ends, counted from 0."""

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

    def source(self, num_stages: int, split: Split = frozenset()) -> Action | None:
        """The neighbouring stage's action whose message this one receives; None if it receives none."""
        stage = self.stage - self.kind.way
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
