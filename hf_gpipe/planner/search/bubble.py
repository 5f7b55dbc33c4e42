"""Finds a change that lowers a large bubble and plans it: more micro-batches, another schedule, or more rows."""

from __future__ import annotations

from operator import attrgetter

from hf_gpipe.errors import UserError
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.search.choose import allowed_plans, can_run, micro_batch_counts, work
from hf_gpipe.planner.search.cut import cut_plan
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.schedule import is_table_file
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.text import seconds_text

#: The bubble, as a share of the time, up to which no change is worth it.
SMALL_BUBBLE = 0.2
#: The most that a change leaves of the bubble, to be worth it.
_SMALLER = 0.9
#: The most times of their size with which M and mini-batches are tried: each size of micro-batch is traced anew.
_MOST_TIMES = 4
#: The most work of the search, in simulated actions: a few seconds.
_MOST_WORK = 20_000


def smaller_bubble(plan: Plan) -> str:
    """Say in one sentence which change fits and lowers a large bubble, and the step with it; empty: there is none.

    The fastest schedule and M come first, for they leave the training as it is, then mini-batches of more rows.
    """
    settings, table, planner = plan.settings, plan.timeline.schedule, plan.planner
    is_made = settings.schedule == TABLE_FILE
    is_given = is_table_file(settings.schedule) and not is_made
    if plan.bubble <= SMALL_BUBBLE or not plan.fits or table.is_window or is_given:
        return ""
    plans = sorted((plan, *_of_the_same_mini_batch(plan)), key=attrgetter("sort_key"))
    best = next(filter(can_run, plans), plan)
    if best.bubble <= _SMALLER * plan.bubble:
        return f"{_changes(plan, best)} fits: {_with(best)}"
    best, words = plan, ""
    for times in (2, _MOST_TIMES):
        larger, count = planner.with_rows(times * planner.rows), times * min(settings.num_micro_batches, planner.rows)
        for recompute in ({}, {"recompute": AUTO}):
            # A table that was made for these micro-batches is none for others.
            changes = {"num_micro_batches": count, **({"schedule": "1f1b"} if is_made else {}), **recompute}
            more = cut_plan(larger, settings.reopened(**changes))
            if more.fits:
                break
        if more.fits and more.bubble < best.bubble and can_run(more):
            best, words = more, " ".join(f"pipeline.{name}={value}" for name, value in changes.items())
    if best is plan:
        return ""
    return (
        f"a mini-batch of {best.planner.rows} rows (training.batch_size or batch_tokens) with {words} fits: "
        f"{_with(best)}, {_a_row(best)} a row where it is {_a_row(plan)}"
    )


def _of_the_same_mini_batch(plan: Plan) -> list[Plan]:
    """The plans with other schedules, and with more micro-batches."""
    plans: list[Plan] = []
    least, room = plan.settings.num_micro_batches, _MOST_WORK
    counts = micro_batch_counts(plan.planner.rows, AUTO)
    for count in (least, *(larger for larger in counts if least < larger <= _MOST_TIMES * least)):
        config = plan.settings.reopened(schedule=AUTO, num_micro_batches=count)
        if room <= 0:
            break
        try:
            allowed = allowed_plans(plan.planner, config)
        except UserError:
            continue
        plans += allowed
        room -= len(allowed) * work(plan.planner, config)
    return plans


def _changes(plan: Plan, other: Plan) -> str:
    names = ("num_micro_batches", "schedule")
    before, after = plan.settings, other.settings
    return " with ".join(
        f"pipeline.{name}={getattr(after, name)}" for name in names if getattr(before, name) != getattr(after, name)
    )


def _with(plan: Plan) -> str:
    return f"a step of {seconds_text(plan.step_seconds)} with a bubble of {plan.bubble:.1%}"


def _a_row(plan: Plan) -> str:
    return seconds_text(plan.step_seconds / plan.planner.rows / plan.planner.inputs.accumulation)
