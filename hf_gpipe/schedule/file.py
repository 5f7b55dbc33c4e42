"""Reads a user's table from a file, validates it, and compares it with the other options of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.kinds import RECOMPUTE, Held
from hf_gpipe.schedule.named import window_schedules
from hf_gpipe.schedule.occupancy import most_of_equal_stages
from hf_gpipe.schedule.placement import replicas_of
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.validate import check_table

TABLE_SUFFIX = ".txt"
"""The suffix of a table's file. A schedule without it is the name of a builder."""

LARGEST_BYTES = 1 << 24
"""A larger file is not a table."""


def is_table_file(schedule: str | None) -> bool:
    """Whether a `schedule` is the path of a table, and not the name of a builder, and is given."""
    return schedule is not None and schedule.endswith(TABLE_SUFFIX)


def read_table(
    path: str,
    num_stages: int,
    num_micro_batches: int | str,
    num_processes: int,
    replicas: int | Sequence[int] = 1,
    group_size: int = 1,
) -> Schedule:
    """Read the table of a training step from a file, and check that it is valid and fits these numbers.

    Args:
        path: path of the file; ~ is the home directory.
        num_stages: K.
        num_micro_batches: micro-batches per step: M times the accumulated mini-batches, and times the size of groups.
            A string is an error.
        num_processes: the number of processes of the job.
        replicas: the number of replicas of every stage, or of each.
        group_size: of the groups of micro-batches.

    Raises:
        ScheduleError: the file and the line that is wrong, what was found, what is allowed and the next step.
    """
    text = file_text(path)
    table = parse_table(text, path)
    try:
        check_table(table)
        if not table.is_training:
            raise ScheduleError(
                "the table has forwards only; a training step has a B for each F, and a U.", "process 0"
            )
        if table.is_window:
            raise ScheduleError(
                "the table has several steps, and a table that is read has one; leave the line out, or name the "
                f"schedule, one of {', '.join(window_schedules())}, which makes a table for as many steps as run.",
                "steps",
            )
        if table.placement.devices is not None:
            raise ScheduleError(
                "the devices of stages are set by the argument device, or pipeline.devices; leave the line out.",
                "devices",
            )
        if table.num_stages != num_stages:
            raise ScheduleError(
                f"the table has {table.num_stages} stages, and num_stages is {num_stages}; change one of them.",
                "num_stages",
            )
        groups.check_file(table.group_size, group_size)
        if table.num_micro_batches != num_micro_batches:
            raise ScheduleError(
                f"the table has {table.num_micro_batches} micro-batches, and num_micro_batches, times the mini-batches "
                f"that a step accumulates{f' and the {groups.MEMBERS}' if group_size > 1 else ''}, is "
                f"{num_micro_batches}; change one of them.",
                "num_micro_batches",
            )
        if table.placement.replicas != replicas_of(num_stages, replicas):
            raise ScheduleError(
                f"the table's stages have {list(table.placement.replicas)} replicas, and replicas is {replicas}; "
                "change one of them.",
                "placement",
            )
        if table.placement.num_processes != num_processes:
            raise ScheduleError(
                f"the table is for {table.placement.num_processes} processes, and there are {num_processes}; set "
                f"num_processes to {table.placement.num_processes}, start as many, or change the placement.",
                "placement",
            )
    except ScheduleError as error:
        raise ScheduleError(f"{path}, line {_line(text, str(error.line))}: {error}") from None
    return table


def recompute_under(table: Schedule, recompute: str | Sequence[str | int]) -> str | tuple[str | int, ...]:
    """Return what each stage recomputes under a user's table, in the form of `Pipeline`'s argument `recompute`.

    The R actions of the table are the recomputations. "stage", the default, accepts them, and so does the value that
    describes them. "block" is not an action, and is allowed for a table without R.

    Raises:
        ScheduleError: `recompute` is anything else.
    """
    entries: list[str | int] = []
    for stage in range(table.num_stages):
        count = table.num_actions(stage, RECOMPUTE)
        whole = "stage" if count == table.num_micro_batches else most_of_equal_stages(table)[stage][Held.GRAPH]
        says = {kind.recompute for kind in table.kinds if kind.recompute and table.num_actions(stage, kind)}
        entries.append(whole if count else next(iter(says), "none"))
    own = entries[0] if isinstance(entries[0], str) and len(set(entries)) == 1 else tuple(entries)
    asked = recompute if isinstance(recompute, str) else tuple(recompute)
    if asked in ("stage", own):
        return own
    if asked == "block" and own == "none":
        return asked
    raise ScheduleError(
        f"recompute is {recompute!r}, and the table {table.name!r} gives the recomputations by its R actions, {own!r}; "
        "leave recompute out."
    )


def parse_table(text: str, path: str) -> Schedule:
    """The table of a file's text, which is not checked. Raises ScheduleError with the file and the line."""
    try:
        return Schedule.from_text(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}, {error}") from None


def file_text(path: str) -> str:
    """The text of a table's file. Raises ScheduleError where it cannot be read, or is too large."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_BYTES + 1)  # what is no regular file may have no end
        if len(content) > LARGEST_BYTES:
            raise ScheduleError(f"schedule: {path} has over {LARGEST_BYTES >> 20} MiB; no table is that large.")
        return content.decode("utf-8-sig")
    except ScheduleError:
        raise
    except FileNotFoundError:
        raise ScheduleError(
            f"schedule: there is no file {path} (looked in {Path.cwd()}); correct the path, or write one with "
            "hf-gpipe plan RECIPE --table."
        ) from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"schedule: {path} is not UTF-8 text ({error.reason}, byte {error.start}).") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ScheduleError(f"schedule: {path} cannot be read: {error}.") from None


def _line(text: str, key: str) -> int:
    """The number of the line that begins with a key."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.partition(":")[0].strip() == key)
