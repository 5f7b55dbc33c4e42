"""Advice for a plan and for a run that is out of memory: what limits it, and the change of a recipe that helps most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, takewhile
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
    rate = plan.planner.device.product_rate(plan.costs.compute_dtype) / 1e12
    cause = (
        _first_cause(shorter, (1 - _LARGE) * seconds)
        or (idle > 2 * _LARGE and _why_each_other(plan))
        or (plan.costs.is_measured and "the layers' measured seconds")
        or f"the layers, whose products are taken to run at {rate:.3g} TFLOP/s"
    )
    others = f", which is {' and '.join(filter(None, (*parts[:1], ', '.join(parts[1:]))))}" if parts else ""
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
    most = max(table.placement.replicas)
    count, size = -(-table.num_micro_batches // (table.num_steps * most)), table.placement.num_processes // most
    if (size - 1) / (count + size - 1) > plan.bubble / 2:
        return f"{count} micro-batches are few for {size} devices in a row"
    mean = sum(stage.busy_seconds for stage in plan.stages) / len(plan.stages)
    if slowest.busy_seconds > (1 + plan.bubble / 2) * mean:
        return f"stage {slowest.number} computes {slowest.busy_seconds / mean:.1f} times as long as the mean"
    return "the order of the actions, in which devices wait for each other"


def _shorter(plan: Plan) -> dict[str, float]:
    """The seconds of a step in which updates, copies or messages take no time."""
    layout, table = plan.layout, plan.timeline.schedule
    costs, stages = costs_of_table(layout), range(table.num_stages)
    others: dict[Any, Any] = {**(costs.others or {})}
    is_on_host = any(layout.host_update_seconds(number) is not None for number in stages)
    place = " on the disk" if any(map(layout.disk_bytes, stages)) else " in CPU memory" * is_on_host
    no_updates = others | {kind: 0.0 for kind in KINDS.values() if kind.changes_weights}
    without = {f"the update{place}": replace(costs, update_seconds=0.0, others=no_updates)}
    for things in dict.fromkeys(kind.copies for kind in KINDS.values() if kind.copies and kind in table.kinds):
        no_copies = others | {kind: 0.0 for kind in KINDS.values() if kind.copies == things}
        without[f"copies of {things}"] = replace(costs, others=no_copies)
    messages = replace(costs, transfer_seconds=0.0, reduce_seconds=0.0, turn_transfer_seconds=0.0)
    without["messages and reductions"] = messages
    return {what: float(simulate(table, less).total_seconds) / table.num_steps for what, less in without.items()}


# ---------------------------------------------------------------------- a smaller bubble


def smaller_bubble(plan: Plan) -> str:
    """Say in one sentence which change fits and lowers a large bubble, and the step with it; empty: there is none.

    The fastest schedule and M come first, for they leave the training as it is, then mini-batches of more rows.
    """
    settings, planner, table = plan.settings, plan.planner, plan.timeline.schedule
    least, rows, is_made = settings.num_micro_batches, planner.rows, settings.schedule == TABLE_FILE
    is_given = is_table_file(settings.schedule) and not is_made
    if plan.bubble <= SMALL_BUBBLE or not plan.fits or table.is_window or is_given:
        return ""
    plans, room = [plan], _MOST_WORK
    for count in (
        least,
        *(larger for larger in micro_batch_counts(rows, AUTO) if least < larger <= _MOST_TIMES * least),
    ):
        config = settings.reopened(schedule=AUTO, num_micro_batches=count)
        with suppress(UserError):
            allowed = allowed_plans(planner, config) if room > 0 else []
            room -= len(allowed) * work(planner, config)
            plans += allowed
    best = next(filter(can_run, sorted(plans, key=attrgetter("sort_key"))), plan)
    if best.bubble <= _SMALLER * plan.bubble:
        new = {name: getattr(best.settings, name) for name in ("num_micro_batches", "schedule")}
        keys = [_argument(name, value) for name, value in new.items() if value != getattr(settings, name)]
        return f"{' with '.join(keys)} fits: {_with(best)}"
    best, words = plan, ""
    for times in (2, _MOST_TIMES):
        for recompute in ({}, {"recompute": AUTO}):
            # A table that was made for these micro-batches is none for others.
            schedule = {"schedule": "1f1b"} if is_made else {}
            changes: dict[str, Any] = {"num_micro_batches": times * min(least, rows), **schedule, **recompute}
            try:
                larger = cut_plan(planner.with_rows(times * rows), settings.reopened(**changes))
            except UserError:
                # Weights that visit need stages that are recomputed.
                continue
            if larger.fits:
                break
        if larger.fits and larger.bubble < best.bubble and can_run(larger):
            best, words = larger, " ".join(_argument(*change) for change in changes.items())
    if best is plan:
        return ""
    before, after = (
        seconds_text(one.step_seconds / one.planner.rows / one.planner.inputs.accumulation) for one in (plan, best)
    )
    return (
        f"a mini-batch of {best.planner.rows} rows (training.batch_size or batch_tokens) with {words} fits: "
        f"{_with(best)}, {after} a row where it is {before}"
    )


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
    planner = plan.planner.within(limit)
    words, changed, least = _first_that_fits(plan, _changed_plans(planner, plan.settings))
    if changed is not None and changed.settings.num_processes == plan.settings.num_processes:
        return f"{words} {_fits(changed)} where it was {seconds_text(plan.step_seconds)}."
    others = []
    if adapters := "; ".join(_adapters_that_fit(plan)):
        others.append(f"where adapters alone are trained, {adapters}")
    for fixes in functions_of_modes("search", "fixes"):
        for name, change in fixes(planner, plan.settings):
            with suppress(UserError):
                own = best_plan(planner, plan.settings.reopened(placement=None, **change))
                if own.fits:
                    hosted = size_text(sum(own.hosted_bytes))
                    others.append(f"{name}, {_arguments(change)} {_fits(own)}, with {hosted} of CPU memory")
    end = ""
    if changed is not None:
        fix = f"{words} {_fits(changed)} where it was {seconds_text(plan.step_seconds)}"
    elif plan.host_fullness > 1:
        fix = "use machines with more CPU memory, an optimizer with less state, or adapters"
    else:
        settings, end = least.settings, "; use devices with more memory, shorter texts, or an optimizer with less state"
        fix = (
            f"no number of stages or micro-batches fits {planner.limit_text}: the leanest way needs "
            f"{size_text(least.peak_bytes)} ({settings.num_stages} stages, {settings.num_micro_batches} micro-batches, "
            f"{settings.schedule})"
        )
    return f"{fix}; on these devices, {'; or '.join(others)}." if others else f"{fix}{end}."


def _first_that_fits(plan: Plan, changes: Iterable[tuple[str, Plan]]) -> tuple[str, Plan | None, Plan]:
    """The first of some changed plans that fits, in words, or None; and the plan that needs the least memory until
    then."""
    least = plan
    for words, changed in changes:
        if changed.fits:
            return words, changed, least
        least = min(least, changed, key=attrgetter("peak_bytes"))
    return "", None, least


def _fits(plan: Plan) -> str:
    return f"fits: {size_text(plan.peak_bytes)} a process at most, and a step of {seconds_text(plan.step_seconds)}"


def _adapters_that_fit(plan: Plan) -> Iterator[str]:
    """Yield the smallest changes with which LoRA, and LoRA on quantised weights, fit the same devices."""
    size = plan.settings.num_processes
    for keys, make in plan.planner.lighter.items():
        with suppress(UserError):  # not for this model or task
            lighter = make()
            changes = chain([("", lighter)], _changed_plans(lighter.planner, lighter.settings))
            on_these = takewhile(lambda change: change[1].settings.num_processes == size, changes)
            words, fitting, _ = _first_that_fits(lighter, on_these)
            if fitting is not None:
                yield f"{keys}{' with ' * bool(words)}{words} {_fits(fitting)}"


def _changed_plans(planner: Planner, settings: DecidedConfig) -> Iterator[tuple[str, Plan]]:
    """Yield each change of keys of `pipeline` in words and as a plan, the smallest first."""
    for change in _changes(planner, settings):
        with suppress(UserError):
            yield _arguments(change), best_plan(planner, settings.reopened(**change))


def _changes(planner: Planner, settings: DecidedConfig) -> Iterator[Mapping[str, Any]]:
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
    num_stages = settings.num_stages
    # Other numbers of replicas for each stage: the schedule is a table of this many stages.
    while isinstance(settings.replicas, int) and num_stages < planner.num_layers:
        # One more at a time at first, then by a quarter.
        num_stages = min(num_stages + max(1, num_stages // 4), planner.num_layers)
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
