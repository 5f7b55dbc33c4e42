"""Cuts a model into stages, by what its layers cost and hold, and chooses what the stages recompute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from hf_gpipe.errors import DataError, PartitionError, ScheduleError, UserError
from hf_gpipe.partition import COST_STRATEGIES, COUNT, by_cost
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs.model_costs import InnerRecompute
from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.memory import MemoryBound
from hf_gpipe.planner.plan import Plan, Planner, best_of
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig

Outcome = Plan | UserError
"""The plan of a configuration, or the error that says why it has none."""


def outcome_of(planner: Planner, config: PipelineConfig) -> Outcome:
    """The outcome of a configuration that leaves at most its partition and its recomputation open."""
    try:
        return cut_plan(planner, config)
    except (PartitionError, ScheduleError, DataError) as error:
        return error


def cut_plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The plan of a configuration that leaves at most its partition and its recomputation open.

    They depend on each other: a split is balanced for what is recomputed, and what is recomputed is what the split
    leaves no room for. If nothing need be recomputed, the model is split without recomputation and with the leanest
    recomputation, and the better split is taken. Otherwise it is split for the leanest recomputation first, and then
    twice for the chosen recomputation.
    Where memory is short, modes that need less are tried too.
    """
    is_auto = config.recompute == AUTO
    num_stages, _ = config.mesh
    even = tuple(map(len, cut(planner.num_layers, num_stages, shares_last=config.shares_last_layer)))
    settings = config.decided(partition=even, recompute="none" if is_auto else config.recompute)
    if not is_auto:
        return planner.plan(settings.replace(partition=choose_partition(planner, settings, config.partition)))
    try:
        plan = planner.plan(settings.replace(partition=choose_partition(planner, settings, config.partition)))
        if plan.fits:
            lean = choose_partition(planner, settings.replace(recompute="stage"), config.partition)
            if lean == plan.settings.partition:
                return plan
            other = planner.plan(settings.replace(partition=lean))
            return best_of(
                other, plan, *([] if other.fits else _of_modes("leaner", planner, settings, config.partition))
            )
    except PartitionError:
        pass
    plans, errors = list[Plan](), list[PartitionError]()
    # Recomputed stages, or recomputed blocks where no whole graph fits.
    for recompute in ("stage", "block"):
        try:
            partition = choose_partition(planner, settings.replace(recompute=recompute), config.partition)
            break
        except PartitionError as error:
            errors.append(error)
    else:
        raise min(errors, key=attrgetter("fullness"))
    settings = settings.replace(partition=partition)
    for _ in range(2):
        settings = settings.replace(recompute=choose_recompute(planner, settings))
        plans.append(planner.plan(settings))
        plans += _of_modes("instead", plans[-1])
        if config.is_cut_by_cost:
            try:
                settings = settings.replace(partition=choose_partition(planner, settings, config.partition))
            except PartitionError:
                break
    return best_of(*plans, *_of_modes("leaner", planner, settings, config.partition))


def _of_modes(name: str, *args: Any) -> Iterator[Plan]:
    """Yield the plans that modes offer in place of others."""
    return (plan for of_mode in functions_of_modes("search", name) for plan in of_mode(*args))


def choose_partition(planner: Planner, settings: DecidedConfig, strategy: str | Sequence[int]) -> tuple[int, ...]:
    """Choose the number of layers of each stage.

    Args:
        settings: the configuration. All but its partition is read, and says what a stage costs and holds.
        strategy: "count", "parameters", "flops", "profile" for measured seconds, "auto" for seconds, measured or not,
            or a list of numbers of layers.

    Raises:
        PartitionError: no split meets the planner's limit of memory, or `partition` raises it.
    """
    costs, is_by_cost = planner.costs(settings.num_micro_batches), strategy in (*COST_STRATEGIES, AUTO)
    given_sizes = COUNT if is_by_cost else strategy
    given = cut(len(costs.layers), settings.num_stages, given_sizes, shares_last=settings.shares_last_layer)
    if not is_by_cost:
        return tuple(map(len, given))
    if strategy == "profile" and not costs.is_measured:
        advice = "plan with --profile, or use flops"
        if not planner.division.is_whole:
            advice = "a run measures divided layers; plan with flops or auto"
        raise PartitionError(f"partition 'profile' needs measured layers, and none were measured; {advice}.")
    layout = planner.layout(settings, planner.table(settings))
    bound, shares, stages = MemoryBound(layout), layout.recompute_shares, layout.stages
    sums, table, placement = layout.sums, layout.table, layout.table.placement
    # The busiest of r replicas runs M / r micro-batches, rounded up; the others wait for the slowest.
    of_replica = [
        -(-table.num_micro_batches // count) / table.num_micro_batches / speed
        for count, speed in zip(placement.replicas, planner.speeds_of(placement), strict=True)
    ]

    def seconds(stage: int, start: int, stop: int) -> float:
        more, own = stages[stage].share, sums.seconds(start, stop, stages[stage].inner)
        own_seconds = own.of_micro_batch(shares[stage])
        return of_replica[stage] * (own_seconds + more.forward_seconds + more.backward_seconds)

    def flops(stage: int, start: int, stop: int) -> float:
        forwards = (1 + shares[stage]) * sums.forward_flops(start, stop)
        return of_replica[stage] * (forwards + sums.backward_flops(start, stop))

    def parameters(_: int, start: int, stop: int) -> float:
        return sums.held(start, stop).num_bytes

    limits = zip(placement.workers, planner.limits_of(placement), strict=True)
    # A process's stages share its memory evenly.
    most = [limit and limit / max(len(placement.stages_of(process)) for process in own) for own, limit in limits]
    caps = [] if None in most else [own or 0.0 for own in most]
    largest = max(caps, default=0.0)

    @cache  # by_cost asks for the same runs of layers again and again
    def memory_bytes(stage: int, start: int, stop: int) -> float:
        # The bytes are scaled as if every stage had the largest limit of all.
        own = largest / caps[stage] if caps else 1.0
        return own * bound.stage_bytes(stage, stages[stage]._replace(start=start, stop=stop))

    cost = {"parameters": parameters, "flops": flops}.get(str(strategy), seconds)
    dip_bytes = bound.dip_bytes() * (largest / min(caps) if caps else 1.0)
    try:
        # A layer that is shared counts to the last stage, which has another one as well.
        *sizes, last = by_cost(
            planner.num_layers - settings.shares_last_layer,
            settings.num_stages,
            cost,
            memory_bytes,
            largest if caps else None,
            memory_dip_bytes=dip_bytes,
        )
    except PartitionError as error:
        limit = planner.memory_bytes
        if set(caps) == {limit}:
            raise
        # The cap of a stage is no limit that anybody gave.
        raise PartitionError(
            f"no split of {planner.num_layers} layers into {settings.num_stages} stages fits the processes' memory "
            f"({planner.limit_text}{' each, which the stages of a process share' * isinstance(limit, int)}): the least "
            f"demanding one needs {error.fullness:.2f} times as much; allow that much, or use more stages or smaller "
            "micro-batches.",
            error.fullness,
        ) from None
    return (*sizes, last + settings.shares_last_layer)


def choose_recompute(planner: Planner, settings: DecidedConfig) -> str | tuple[str | int, ...]:
    """Choose the largest number of stored graphs that fits the planner's limit, for each stage.

    Each graph above the first spares the recomputation of a micro-batch. Where not even one whole graph fits, the stage
    recomputes its blocks instead, if that needs less. The partition of the settings is decided, and their `recompute`
    is not read.

    Returns:
        "none" where nothing need be recomputed, else an entry for each stage. Where it does not fit, nothing does.
    """
    layout = planner.layout(settings.replace(recompute="none"))
    bound, placement = MemoryBound(layout), layout.table.placement
    limits = planner.limits_of(placement)
    entries: list[str | int] = ["none"] * settings.num_stages
    for own in dict.fromkeys(map(placement.stages_of, range(placement.num_processes))):
        limit = min((own_limit for stage in own if (own_limit := limits[stage]) is not None), default=None)
        if limit is None:
            return "none"
        for stage, entry in _stored_graphs(bound, layout.stages, own, limit):
            entries[stage] = entry
    return "none" if set(entries) == {"none"} else tuple(entries)


def _stored_graphs(
    bound: MemoryBound, layers: Sequence[StageLayers], own: Sequence[int], limit: int
) -> Iterator[tuple[int, str | int]]:
    """Yield the most stored graphs of each stage of a process, "none" where it may store all, or "block"."""
    most = {stage: bound.most[stage][Held.GRAPH] for stage in own}
    live = dict.fromkeys(own, 1)
    inner: dict[int, InnerRecompute] = dict.fromkeys(own, "none")

    def needed() -> float:
        parts = [bound.parts(stage, layers[stage]._replace(inner=inner[stage]), live[stage]) for stage in own]
        # One action works at a time, so the largest working memory of all stages is enough.
        return sum(kept for kept, _ in parts) + max(working for _, working in parts)

    for stage in own:
        if (before := needed()) > limit:
            # The stage has as many graphs of its blocks' inputs as the table ever has.
            live[stage], inner[stage] = most[stage], "block"
            if needed() >= before:
                live[stage], inner[stage] = 1, "none"
    # Stages grow in turn, so that no stage recomputes everything while another recomputes nothing.
    growing = [stage for stage in own if inner[stage] == "none"]
    while growing and needed() <= limit:
        for stage in [*growing]:
            live[stage] += 1
            if live[stage] > most[stage] or needed() > limit:
                live[stage] -= 1
                growing.remove(stage)
    for stage in own:
        yield stage, "block" if inner[stage] == "block" else "none" if live[stage] >= most[stage] else live[stage]
