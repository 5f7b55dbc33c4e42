"""The table that a pipeline with given settings runs, with visits of weights, offloads and updates."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import ScheduleError
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import (
    LONGEST_WINDOW,
    Schedule,
    build,
    has_windows,
    recompute_under,
    with_modes,
)
from hf_gpipe.schedule.updates import updates_beside, with_updates_last
from hf_gpipe.settings.pipeline import DecidedConfig


def table_of(
    settings: DecidedConfig, inputs: PlanInputs, num_micro_batches: int, chunks: int, sizes: Sequence[int] | None = None
) -> Schedule:
    """The table of these settings, whose partition is not read.

    A window has about `LONGEST_WINDOW` micro-batches.

    Args:
        settings: the settings of the pipeline.
        inputs: the planner's inputs, which have the tables that were read from files.
        num_micro_batches: the number of micro-batches of a step, where each chunk of a row counts.
        chunks: the number of chunks of each row.
        sizes: the size of each stage, by which the updates of dealt stages are shared out; None: stages are equal.

    Raises:
        ScheduleError: there is no such table, or the schedule is a table from a file with other numbers.
    """
    name, num_stages = settings.schedule, settings.num_stages
    if (given := inputs.tables.get(name)) is not None:
        asked = num_stages, inputs.accumulation * settings.num_micro_batches * chunks, settings.num_processes
        if asked != (given.num_stages, given.num_micro_batches, given.placement.num_processes):
            raise ScheduleError(f"the table {name} is of other numbers of stages, micro-batches or processes.")
        recompute_under(given, settings.recompute)
        return completed(given.of_first(num_micro_batches), settings, inputs)
    placement = settings.placed(name)
    if sizes is not None and settings.placement is None:
        placement = placement.balanced(sizes)
    recompute = Recompute.parse(settings.recompute, num_stages)
    count, steps = num_micro_batches, None
    if has_windows(name):
        steps = [num_micro_batches] * max(4, LONGEST_WINDOW // num_micro_batches)
        count = sum(steps)
    given_chunks = 1 if steps else chunks
    built = build(
        name, num_stages, count, placement, recompute.of_table, steps=steps, group_size=given_chunks, is_checked=False
    )
    table = with_modes(built, recompute.entries)
    return table if steps else completed(table, settings, inputs)


def completed(table: Schedule, settings: DecidedConfig, inputs: PlanInputs) -> Schedule:
    """Put what modes add to every table of these settings into a table, and check it."""
    for complete in functions_of_modes("table", "complete"):
        table = complete(table, settings)
    for check in functions_of_modes("table", "check"):
        check(table, settings)
    return with_updates_of_run(table, inputs)


def with_updates_of_run(table: Schedule, inputs: PlanInputs) -> Schedule:
    """Put the updates of a table where a run has them: dealt stages are updated beside backwards, if nothing needs the
    norm of the whole gradient."""
    needs_all = inputs.needs_norm or inputs.updates > 1
    return (None if needs_all else updates_beside(table)) or with_updates_last(table)
