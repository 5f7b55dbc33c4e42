"""Reads the table that a configuration names as its schedule."""

from __future__ import annotations

from hf_gpipe.recipe.pipeline import PipelineConfig
from hf_gpipe.schedule import Schedule, is_table_file, read_table, recompute_under


def table_of(config: PipelineConfig, accumulation: int, num_processes: int) -> Schedule | None:
    """Read the table from the file that `schedule` names; None if it names a builder or is "auto".

    Args:
        config: the configuration, which the table has to agree with.
        accumulation: mini-batches per step; the table has the micro-batches of all of them.
        num_processes: the number of processes of the job.

    Raises:
        ScheduleError: the file cannot be read, its table cannot be run, or it contradicts the configuration.
    """
    if not is_table_file(config.schedule):
        return None
    step: int | str = config.num_micro_batches
    if isinstance(step, int):
        step *= accumulation
    table = read_table(config.schedule, config.num_stages, step, num_processes, config.replicas)
    recompute_under(table, config.recompute)
    return table
