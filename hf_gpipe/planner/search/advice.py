"""Advice for a plan and for a run that is out of memory: what limits it, and the change of a recipe that helps most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from hf_gpipe.errors import StageError, UserError
from hf_gpipe.job import failures
from hf_gpipe.planner.layout import costs_of_table
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import allowed_plans, best_plan, can_run, micro_batch_counts, work
from hf_gpipe.planner.search.cut import cut_plan
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import is_table_file, simulate
from hf_gpipe.schedule.kinds import KINDS
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig
from hf_gpipe.text import seconds_text, size_text

#: The share of a step below which something does not limit the step, if something else does.
_LARGE = 0.2
#: The bubble, as a share of the time, up to which no change is worth it.
SMALL_BUBBLE = 0.2
#: The most that a change leaves of the bubble, to be worth it.
_SMALLER = 0.9
#: The most times of their size with which M and mini-batches are tried: each size of micro-batch is traced anew.
_MOST_TIMES = 4
#: The most work of the search for a smaller bubble, in simulated actions: a few seconds.
_MOST_WORK = 20_000
#: The most memory of the advised plan, as a share of the plan that was to fit and did not.
_SAFE_SHARE = 0.9

# ---------------------------------------------------------------------- what limits a step


def limit_of_step(plan: Plan) -> str:
    """Say in one sentence what limits a step: updates, copies or messages; else the devices' rate or their waiting."""
    seconds, shorter = plan.table_seconds, _shorter(plan)
    parts = [f"{seconds_text(rest)} without {what}" for what, rest in shorter.items() if rest < 0.98 * seconds]
    times = [process.time for process in plan.processes]
    idle = 1 - sum(time.forward + time.recompute + time.backward for time in times) / (len(times) * seconds)
    cause = _first_cause(shorter, (1 - _LARGE) * seconds)
    if not cause and idle > 2 * _LARGE:
        cause = _why_each_other(plan)
    if not cause and plan.costs.is_measured:
        cause = "the layers' measured seconds"
    if not cause:
        rate = plan.layout.processes.device.product_rate(plan.costs.compute_dtype) / 1e12
        cause = f"the layers, whose products are taken to run at {rate:.3g} TFLOP/s"
    rest = ", ".join(parts[1:])
    others = f", which is {parts[0]}{f' and {rest}' if rest else ''}" if parts else ""
    return f"{cause}; devices compute {1 - idle:.0%} of a step{others}"


def why_waiting(plan: Plan) -> str:
    """Say what most of a plan's bubble comes from."""
    return _first_cause(_shorter(plan), (1 - plan.bubble / 2) * plan.table_seconds) or _why_each_other(plan)


def _first_cause(shorter: Mapping[str, float], limit: float) -> str:
    """The first cause that makes a step so much shorter where it takes no time; empty where none does."""
    least = min(shorter, key=lambda what: shorter[what])
    return least if shorter[least] < limit else ""


def _why_each_other(plan: Plan) -> str:
    """Say why devices wait for each other: there are few micro-batches, or a stage computes longer than the others."""
    table, slowest = plan.timeline.schedule, plan.slowest_stage
    placement = table.placement
    count = -(-table.num_micro_batches // (table.num_steps * max(placement.replicas)))
    size = placement.num_processes // max(placement.replicas)
    if (size - 1) / (count + size - 1) > plan.bubble / 2:
        return f"{count} micro-batches are few for {size} devices in a row"
    mean = sum(stage.busy_seconds for stage in plan.stages) / len(plan.stages)
    if slowest.busy_seconds > (1 + plan.bubble / 2) * mean:
        return f"stage {slowest.number} computes {slowest.busy_seconds / mean:.1f} times as long as the mean"
    return "the order of the actions, in which devices wait for each other"


def _shorter(plan: Plan) -> dict[str, float]:
    """The seconds of a step in which updates, copies or messages take no time."""
    layout, table = plan.layout, plan.timeline.schedule
    costs = costs_of_table(layout)
    others: dict[str, Any] = {**(costs.others or {})}
    is_on_host = any(layout.host_update_seconds(number) is not None for number in range(table.num_stages))
    place = " on the disk" if any(map(layout.disk_bytes, range(table.num_stages))) else " in CPU memory" * is_on_host
    without = {
        f"the update{place}": replace(costs, update_seconds=0.0),
        **{
            f"copies of {things}": replace(
                costs, others=others | {kind: 0.0 for kind in KINDS.values() if kind.copies == things}
            )
            for things in dict.fromkeys(kind.copies for kind in KINDS.values() if kind.copies and kind in table.kinds)
        },
        "messages and reductions": replace(costs, transfer_seconds=0.0, reduce_seconds=0.0, turn_transfer_seconds=0.0),
    }
    return {what: float(simulate(table, less).total_seconds) / table.num_steps for what, less in without.items()}


# ---------------------------------------------------------------------- a smaller bubble


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
        changes: dict[str, Any] = {name: getattr(best.settings, name) for name in ("num_micro_batches", "schedule")}
        keys = [_argument(name, value) for name, value in changes.items() if value != getattr(settings, name)]
        return f"{' with '.join(keys)} fits: {_with(best)}"
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
            best, words = more, " ".join(_argument(*change) for change in changes.items())
    if best is plan:
        return ""
    before, after = (
        seconds_text(one.step_seconds / one.planner.rows / one.planner.inputs.accumulation) for one in (plan, best)
    )
    return (
        f"a mini-batch of {best.planner.rows} rows (training.batch_size or batch_tokens) with {words} fits: "
        f"{_with(best)}, {after} a row where it is {before}"
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
        with suppress(UserError):
            plans += (allowed := allowed_plans(plan.planner, config))
            room -= len(allowed) * work(plan.planner, config)
    return plans


def _with(plan: Plan) -> str:
    return f"a step of {seconds_text(plan.step_seconds)} with a bubble of {plan.bubble:.1%}"


# ---------------------------------------------------------------------- less memory


def smallest_fix(plan: Plan) -> str:
    """Say in one sentence what to change so that the plan's model fits.

    Changes that cost little come first: recomputation, the schedule, more micro-batches, an even split, and only then
    more stages. Where only more devices or none of these would help, adapters that fit the devices are named too, and
    what modes offer. A plan that should have fit, but ran out of memory, gets a change that needs a tenth less memory.
    """
    limit = plan.planner.memory_bytes
    if limit is None or plan.fits:
        limit = round(_SAFE_SHARE * plan.peak_bytes)
    least, fix, planner = plan, "", plan.planner.within(limit)
    for words, changed in _changed_plans(planner, plan):
        if changed.fits:
            fix = f"{words} {_fits(changed)} where it was {seconds_text(plan.step_seconds)}"
            if changed.settings.num_processes == plan.settings.num_processes:
                return f"{fix}."
            break
        least = min(least, changed, key=lambda plan: plan.peak_bytes)
    others = [f"where adapters alone are trained, {text}" for text in ["; ".join(_adapters_that_fit(plan))] if text]
    others += _modes_that_fit(planner, plan)
    if not fix and plan.host_fullness > 1:
        fix = "use machines with more CPU memory, an optimizer with less state, or adapters"
    elif not fix:
        settings = least.settings
        fix = (
            f"no number of stages or micro-batches fits {planner.limit_text}: the leanest way needs "
            f"{size_text(least.peak_bytes)} ({settings.num_stages} stages, {settings.num_micro_batches} micro-batches, "
            f"{settings.schedule})"
        )
        if not others:
            return f"{fix}; use devices with more memory, shorter texts, or an optimizer with less state."
    return f"{fix}; on these devices, {'; or '.join(others)}." if others else f"{fix}."


def _fits(plan: Plan) -> str:
    return f"fits: {size_text(plan.peak_bytes)} a process at most, and a step of {seconds_text(plan.step_seconds)}"


def _adapters_that_fit(plan: Plan) -> Iterator[str]:
    """Yield the smallest changes with which LoRA, and LoRA on quantised weights, fit the same devices."""
    for keys, make in plan.planner.lighter.items():
        with suppress(UserError):  # not for this model or task
            lighter = make()
            changes = ((f"{keys} with {words}", other) for words, other in _changed_plans(lighter.planner, lighter))
            for words, candidate in chain([(keys, lighter)], changes):
                if candidate.settings.num_processes != plan.settings.num_processes:
                    break
                if candidate.fits:
                    yield f"{words} {_fits(candidate)}"
                    break


def _modes_that_fit(planner: Planner, plan: Plan) -> Iterator[str]:
    """Yield the keys of modes with which the same devices are enough."""
    for fixes in functions_of_modes("search", "fixes"):
        for words, change in fixes(planner, plan.settings):
            with suppress(UserError):
                changed = best_plan(planner, plan.settings.reopened(placement=None, **change))
                if changed.fits:
                    hosted = size_text(sum(changed.hosted_bytes))
                    yield f"{words}, {_arguments(change)} {_fits(changed)}, with {hosted} of CPU memory"


def _changed_plans(planner: Planner, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield each change in words and as a plan, the smallest first."""
    for change in _changes(planner, plan.settings):
        with suppress(UserError):
            yield _arguments(change), best_plan(planner, plan.settings.reopened(**change))


def _changes(planner: Planner, settings: DecidedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield keys of `pipeline` with other values, the smallest change first."""
    lean: dict[str, Any] = {"schedule": "1f1b", "recompute": AUTO}
    if settings.recompute != "stage":
        yield {"recompute": AUTO}
    if settings.schedule != "1f1b":
        yield {"schedule": "1f1b"}
        yield lean
    more = [count for count in micro_batch_counts(planner.rows, AUTO) if count > settings.num_micro_batches]
    for others in ({}, lean):
        yield from ({"num_micro_batches": count, **others} for count in more)
    finest = {"num_micro_batches": max([settings.num_micro_batches, *more]), **lean, "partition": AUTO}
    yield finest
    if isinstance(settings.replicas, tuple):
        return  # the schedule is a table of this many stages
    num_stages, num_layers = settings.num_stages, planner.num_layers
    while num_stages < num_layers:
        # One more at a time at first, then by a quarter.
        num_stages = min(num_stages + max(1, num_stages // 4), num_layers)
        of_replica = settings.num_processes // settings.replicas
        processes = num_stages * of_replica // settings.num_stages * settings.replicas
        yield {"num_stages": num_stages, "num_processes": processes, **finest}


def _arguments(change: Mapping[str, Any]) -> str:
    """Write a change as arguments of a recipe. A number of processes is written as a number of devices."""
    first, *others = (_argument(*key) for key in change.items() if key[0] != "num_processes")
    devices = f" on {change['num_processes']} devices" if "num_processes" in change else ""
    return f"{first}{devices}{' with ' * bool(others)}{', '.join(others)}"


def _argument(name: str, value: object) -> str:
    return f"pipeline.{name}={value}"


# ---------------------------------------------------------------------- a run


@contextmanager
def advising(plan: Callable[[], Plan], rank: int) -> Iterator[None]:
    """Context manager that adds to an out-of-memory error what would need less memory.

    Args:
        plan: a function that makes the plan of the run; it may fail, for an optimizer that is not known.
        rank: the rank of this process.

    Raises:
        StageError: in place of the failure, whose message it has.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_want_of_memory(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        failures.note(error)  # planning takes seconds
        what = str(error) if isinstance(error, StageError) else f"process {rank}: {error!r}"
        advice = "More micro-batches, recompute 'stage', the schedule 1f1b or more stages need less."
        # Whatever hinders the planner now, the failure to report is the run's.
        with suppress(Exception):
            advice = f"By the planner, {smallest_fix(plan())}"
        raise StageError(f"{what.rstrip('.')}. {advice}") from error


def _is_want_of_memory(error: BaseException) -> bool:
    # On the CPU torch has no class of its own for this error.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
