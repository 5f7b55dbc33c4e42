"""The table that a recipe names as its schedule."""

from __future__ import annotations

from hf_gpipe.recipe.fields import Recipe
from hf_gpipe.schedule import Schedule, is_table_file, read_table, recompute_under


def table_of(recipe: Recipe, num_processes: int) -> Schedule | None:
    """The table in the file that `pipeline.schedule` names, or None where it names one of the builders or "auto".

    Raises:
        ScheduleError: the file cannot be read, its table cannot be run, or it contradicts the recipe.
    """
    pipeline = recipe.pipeline
    if not is_table_file(pipeline.schedule):
        return None
    step: int | str = pipeline.num_micro_batches
    if isinstance(step, int):
        step *= recipe.training.gradient_accumulation_steps
    table = read_table(pipeline.schedule, pipeline.num_stages, step, num_processes)
    recompute_under(table, pipeline.recompute)
    return table
