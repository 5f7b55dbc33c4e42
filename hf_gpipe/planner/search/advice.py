"""The smallest change that makes a plan fit, in the words of a recipe; a run that is out of memory names it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from hf_gpipe.errors import StageError, UserError
from hf_gpipe.job import failures
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan, micro_batch_counts
from hf_gpipe.planner.search.visiting import SETTING, possible_visitors
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig
from hf_gpipe.text import seconds_text, size_text

#: The most memory of the advised plan, as a share of the plan that was to fit and did not.
_SAFE_SHARE = 0.9


def smallest_fix(plan: Plan) -> str:
    """Say in one sentence what to change so that the plan's model fits.

    Changes that cost little come first: recomputation, the schedule, more micro-batches, an even split, and only then
    more stages. Where only more devices or none of these would help, adapters that fit the devices are named too, and
    weights that visit them. A plan that should have fit, but ran out of memory, gets a change that needs a tenth less
    memory.
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
    others = [
        f"where adapters alone are trained, {change}" for change in ["; ".join(_adapters_that_fit(plan))] if change
    ]
    others += [f"with weights in CPU memory, {change}" for change in _visits_that_fit(planner, plan)]
    if not fix and plan.host_fullness > 1:
        fix = f"use machines with more CPU memory, an optimizer with less state, or adapters with {SETTING}=frozen"
    elif not fix:
        fix = (
            f"no number of stages or micro-batches fits {planner.limit_text}: the leanest way needs "
            f"{size_text(least.peak_bytes)} ({_words(least)})"
        )
        if not others:
            return f"{fix}; use devices with more memory, shorter texts, or an optimizer with less state."
    if not others:
        return f"{fix}."
    return f"{fix}; on these devices, {'; or '.join(others)}."


def _fits(plan: Plan) -> str:
    return f"fits: {size_text(plan.peak_bytes)} a process at most, and a step of {seconds_text(plan.step_seconds)}"


def _adapters_that_fit(plan: Plan) -> Iterator[str]:
    """Yield the smallest changes with which LoRA, and LoRA on quantised weights, fit the same devices."""
    for keys, make in plan.planner.lighter.items():
        try:
            lighter = make()
        except UserError:
            continue  # not for this model or task
        changes = ((f"{keys} with {words}", candidate) for words, candidate in _changed_plans(lighter.planner, lighter))
        for words, candidate in chain([(keys, lighter)], changes):
            if candidate.settings.num_processes != plan.settings.num_processes:
                break
            if candidate.fits:
                yield f"{words} {_fits(candidate)}"
                break


def _visits_that_fit(planner: Planner, plan: Plan) -> Iterator[str]:
    """Yield the change that lets weights visit the same GPUs, with stages as small as possible, if that fits."""
    settings = plan.settings
    if settings.replicas != 1 or settings.visits.offload_weights is not None:
        return
    num_stages = planner.num_layers // settings.num_processes * settings.num_processes
    if num_stages < 3 * settings.num_processes:
        return
    for visitors in possible_visitors(planner)[:1]:
        change = {SETTING: visitors, "num_stages": num_stages, "schedule": "breadth_first"}
        change |= {"recompute": "stage", "partition": "count"}
        with suppress(UserError):
            visiting = best_plan(planner, settings.reopened(placement=None, **change))
            if visiting.fits:
                hosted = size_text(sum(visiting.hosted_bytes))
                yield f"{_arguments(change)} {_fits(visiting)}, with {hosted} of CPU memory"


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
    for num_stages in _more_stages(settings.num_stages, planner.num_layers):
        of_replica = settings.num_processes // settings.replicas
        processes = num_stages * of_replica // settings.num_stages * settings.replicas
        yield {"num_stages": num_stages, "num_processes": processes, **finest}


def _arguments(change: Mapping[str, Any]) -> str:
    """Write a change as arguments of a recipe. A number of processes is written as a number of devices."""
    first, *others = (f"pipeline.{name}={value}" for name, value in change.items() if name != "num_processes")
    devices = f" on {change['num_processes']} devices" if "num_processes" in change else ""
    return f"{first}{devices}{' with ' * bool(others)}{', '.join(others)}"


def _more_stages(num_stages: int, num_layers: int) -> Iterator[int]:
    """Yield larger K: one more at a time at first, then by a quarter, up to one stage for each layer."""
    while num_stages < num_layers:
        num_stages = min(num_stages + max(1, num_stages // 4), num_layers)
        yield num_stages


def _words(plan: Plan) -> str:
    settings = plan.settings
    return f"{settings.num_stages} stages, {settings.num_micro_batches} micro-batches, {settings.schedule}"


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
        if not any(_is_want_of_memory(cause) for cause in _causes(error)):
            raise
        failures.note(error)  # planning takes seconds
        what = str(error) if isinstance(error, StageError) else f"process {rank}: {error!r}"
        raise StageError(f"{what.rstrip('.')}. {_advice(plan)}") from error


def _advice(plan: Callable[[], Plan]) -> str:
    """The advice in one sentence."""
    try:
        return f"By the planner, {smallest_fix(plan())}"
    except Exception:
        # Whatever hinders the planner now, the failure to report is the run's.
        return "More micro-batches, recompute 'stage', the schedule 1f1b or more stages need less."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_want_of_memory(error: BaseException) -> bool:
    # On the CPU torch has no class of its own for this error.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
