"""Groups of micro-batches, and what is wrong with the groups of a table, in the words of its text: chunks of rows.

Consecutive micro-batches of a group depend on each other: a stage runs their forwards in order and their backwards in
reverse, all of them on one of its replicas. So the chunks of a row are a group, because later tokens attend to earlier
ones. A table says how many micro-batches each group has; without groups this is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_gpipe.errors import ScheduleError

#: The key of a table's text that gives the size of groups.
KEY = "chunks"
#: The members of a group, for errors.
MEMBERS = "chunks of a row"


class Groups(NamedTuple):
    """How micro-batches are cut into groups: into at most so many members, and how much shorter later ones are."""

    size: int = 1
    taper: float = 0.0

    def within(self, tokens: int) -> Groups:
        """The groups of rows of so many tokens: a member has at least one token."""
        return self._replace(size=min(self.size, tokens))


def in_words(size: int) -> str:
    """A group of this size."""
    return "one micro-batch" if size == 1 else f"a row of {size} {KEY}"


def cut_in_words(size: int, tokens: int) -> str:
    """The way in which groups of this size cut rows of so many tokens."""
    return f"cut into {size} {KEY} of at most {-(-tokens // size)} tokens"


def as_dict(groups: Groups, member: int) -> dict[str, float]:
    """Groups, and the number of one of their members, for a JSON file."""
    return {KEY: groups.size, "taper": groups.taper, "chunk": member}


def check_size(size: int) -> None:
    """Raise ScheduleError unless a group has a member."""
    if size < 1:
        raise ScheduleError(f"{KEY} is {size}: a row has at least one chunk.")


def check_schedule(name: str, size: int, num_micro_batches: int, others: Sequence[str], *, has_order: bool) -> None:
    """Raise ScheduleError unless groups of this size, above 1, are whole, and the schedule has an order for them.

    Args:
        others: the schedules that have one, for the message.
        has_order: whether this schedule has one.
    """
    if not has_order:
        raise ScheduleError(
            f"schedule {name!r} has no order for rows that are cut into chunks ({KEY} is {size}); use one of "
            f"{', '.join(others)}, or let {KEY} be 1."
        )
    if num_micro_batches % size:
        raise ScheduleError(
            f"schedule {name!r}: num_micro_batches is {num_micro_batches} and {KEY} is {size}: each row has all "
            f"its chunks; use a multiple of {KEY}."
        )


def fault(size: int, num_micro_batches: int) -> str:
    """The fault where groups of this size are not whole, or a table with them has several steps."""
    return (
        f"{KEY} is {size} and num_micro_batches {num_micro_batches}: a table of one step can cut its "
        f"rows into chunks, and each row has all of them; use a multiple of {KEY}, and leave steps out."
    )


def check_file(size: int, wanted: int) -> None:
    """Raise ScheduleError unless the groups of a table that was read are of the size that is wanted."""
    if size != wanted:
        raise ScheduleError(
            f"the table cuts rows into {size} chunks, and sequence_chunks is {wanted}; change one of them.",
            "num_micro_batches" if size == 1 else KEY,
        )


def check_step(name: str, size: int, wanted: int) -> None:
    """Raise ScheduleError unless a step has groups of the size that its table has."""
    if size != wanted:
        raise ScheduleError(
            f"the table {name!r} cuts rows into {size} chunks, and those of this step are in {wanted}; give rows of "
            f"at least {size} tokens."
        )
