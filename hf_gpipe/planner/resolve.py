"""What "auto" means for a run: the fastest way to run it that fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.plan import Plan, Planner, seconds_text
from hf_gpipe.planner.recompute import choose_recompute
from hf_gpipe.planner.settings import AUTO, Request, Settings, Settled
from hf_gpipe.planner.split import choose_partition
from hf_gpipe.recipe.sizes import size_text

logger = logging.getLogger(__name__)

AUTO_SCHEDULES = ("1f1b", "gpipe_fused", "gpipe", "interleaved_1f1b")
"""What "auto" chooses from, the one with the least memory first."""


def resolve(planner: Planner, request: Request) -> Settled:
    """Decide everything that a request leaves to the planner; what was chosen is logged in one line.

    Of all that is allowed it is the fastest that fits the planner's limit. Where nothing fits, it is what needs the
    least memory: the prediction may be wrong, and the run will tell.

    Args:
        planner: of the model, its mini-batch and its device.
        request: K, and for all else a value or "auto". Its limit of memory is the planner's where it is given.

    Raises:
        UserError: one of its kinds, for what no pipeline could do.
    """
    if request.is_settled:
        counts = [len(stage) for stage in cut(planner.num_layers, request.num_stages, request.partition)]
        return Settled(counts, request.schedule, request.given_micro_batches, request.recompute_choice, "as given")
    best = best_plan(planner, request)
    settings = best.settings
    why = _why(best, request)
    logger.info(why)
    return Settled(list(settings.partition), settings.schedule, settings.num_micro_batches, settings.recompute, why)


def best_plan(planner: Planner, request: Request) -> Plan:
    """The fastest plan that a request allows and that fits; where none does, the one that needs the least memory.

    Raises:
        PartitionError: the partition is by cost, and no split of any allowed plan meets the limit.
    """
    if request.memory_bytes is not None:
        planner = planner.within(request.memory_bytes)
    found: Plan | None = None
    refusal: UserError | None = None
    for one in _allowed(planner, request):
        try:
            plan = planned(planner, one)
        except (PartitionError, ScheduleError) as error:
            refusal = refusal or error
            continue
        if found is None or _rank(plan) < _rank(found):
            found = plan
    if found is None:
        assert refusal is not None, "a request allows something"
        raise refusal
    return found


def planned(planner: Planner, request: Request) -> Plan:
    """The plan of a request that leaves at most its partition and its recomputation open.

    They depend on each other: a split is balanced for what is recomputed, and what is recomputed is what the split
    leaves no room for. So the leanest recomputation is split for first, and then twice what was chosen.
    """
    is_auto = request.recompute == AUTO
    settings = Settings(
        request.num_stages,
        request.given_micro_batches,
        request.schedule,
        "stage" if is_auto else request.recompute_choice,
        (),
        request.processes,
        request.optimizer,
        request.fp32_master_weights,
    )
    settings = replace(settings, partition=choose_partition(planner, settings, request.partition))
    if not is_auto:
        return planner.plan(settings)
    plans = []
    for _ in range(2):
        settings = replace(settings, recompute=choose_recompute(planner, settings))
        plans.append(planner.plan(settings))
        if isinstance(request.partition, str) and request.partition != "count":
            try:
                settings = replace(settings, partition=choose_partition(planner, settings, request.partition))
            except PartitionError:
                break
    return min(plans, key=_rank)


def _allowed(planner: Planner, request: Request) -> Iterator[Request]:
    """The request with its schedule and M decided, in every way that is worth a try."""
    schedules = AUTO_SCHEDULES if request.schedule == AUTO else (request.schedule,)
    for schedule in schedules:
        if schedule == "interleaved_1f1b" and request.schedule == AUTO and request.processes == request.num_stages:
            continue
        for num_micro_batches in micro_batch_counts(planner.rows, request.num_micro_batches):
            yield replace(request, schedule=schedule, num_micro_batches=num_micro_batches)


def micro_batch_counts(rows: int, asked: int | str) -> list[int]:
    """The numbers of micro-batches that "auto" chooses from: the powers of two up to one a row, and one a row."""
    if isinstance(asked, int):
        return [asked]
    return sorted({rows, *(2**power for power in range(rows.bit_length()))})


def _rank(plan: Plan) -> tuple[float, ...]:
    """What the best plan has the least of."""
    if not plan.fits:
        return (1.0, plan.peak_bytes)
    # A gain below the model's own error is none: then the fewer messages and the less memory.
    return (0.0, float(f"{plan.step_seconds:.3g}"), plan.settings.num_micro_batches, plan.peak_bytes)


def _why(plan: Plan, request: Request) -> str:
    settings = plan.settings
    chosen = []
    if request.schedule == AUTO:
        chosen.append(f"schedule {settings.schedule}")
    if request.num_micro_batches == AUTO:
        chosen.append(f"num_micro_batches {settings.num_micro_batches}")
    if request.recompute == AUTO:
        entries = settings.recompute
        chosen.append(f"recompute {entries if isinstance(entries, str) else list(entries)}")
    if isinstance(request.partition, str) and request.partition != "count":
        chosen.append(f"partition {list(settings.partition)} ({request.partition})")
    limit = plan.planner.memory_bytes
    fits = "no limit of memory is known" if limit is None else f"the limit is {size_text(limit)}"
    return (
        f"planner: {', '.join(chosen)}: a step of {seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, the "
        f"fullest process at {size_text(plan.peak_bytes)}; {fits}{'' if plan.fits else ', which nothing allowed fits'}"
    )
