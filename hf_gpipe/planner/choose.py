"""The choice of what a configuration leaves open: the fastest plan that fits.

`best_plan` tries each schedule and M that the configuration allows, and where stages or replicas are open the meshes
(mesh.py). For each it chooses where to cut the model and what to recompute. `search` (search.py) leaves everything
open, and shows more than the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.partition import COST_STRATEGIES, by_cost
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.limits import limit_text, limits_of, speeds_of
from hf_gpipe.planner.live_graphs import choose_recompute
from hf_gpipe.planner.memory import StageLayers
from hf_gpipe.planner.mesh import meshes, too_few_rows
from hf_gpipe.planner.orders import exchanges, kinds_of
from hf_gpipe.planner.plan import Plan, Planner, inner_recompute, recompute_shares
from hf_gpipe.recipe import AUTO, DecidedConfig, PipelineConfig
from hf_gpipe.schedule import SPLIT_SCHEDULES, V_SHAPED, Placement, replicas_of

AUTO_SCHEDULES = ("1f1b", "gpipe_fused", "gpipe", "interleaved_1f1b", *SPLIT_SCHEDULES)
"""The schedules that "auto" chooses from. Of equally good ones the first is chosen."""

#: Where meshes are compared, M is at first between these times the number of processes: with fewer micro-batches most
#: processes would wait, and with more each simulation takes long and the bubble is no longer large.
_MICRO_BATCHES_A_PROCESS = 0.25, 4
#: Actions of all tables that are simulated to compare meshes: a few seconds.
MOST_ACTIONS = 20_000


def best_plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The fastest plan that a configuration allows and that fits; where none does, the one that needs the least memory.

    Args:
        planner: of the model, its mini-batch and its device.
        config: a value or "auto" for everything, and the number of processes where stages or replicas are "auto". The
            limit of memory is the planner's.

    Raises:
        PartitionError: the partition is by cost, and no split of any allowed plan meets the limit.
        UserError: another of its kinds, for what no pipeline could do.
    """
    return min(allowed_plans(planner, config), key=rank)


def allowed_plans(planner: Planner, config: PipelineConfig) -> list[Plan]:
    """The plans that a configuration allows and that are worth a try, at least one. Raises as `best_plan`."""
    tries, config = _Tries(planner), config.settled(can_plan=True)
    if not config.is_mesh_open:
        for one in _allowed(planner, config):
            tries.add(one)
    else:
        _try_meshes(tries, config)
    return tries.result()


class _Tries:
    """The plans that were tried, and the error of the least demanding one that cannot be."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.plans: list[Plan] = []
        self.best: Plan | None = None
        self._failure: PartitionError | ScheduleError | None = None

    def add(self, config: PipelineConfig) -> bool:
        """Try a configuration that leaves at most its partition and its recomputation open; returns if it can be."""
        try:
            plan = _plan(self.planner, config)
        except (PartitionError, ScheduleError) as error:
            if self._failure is None or _fullness(error) < _fullness(self._failure):
                self._failure = error
            return False
        self.plans.append(plan)
        if self.best is None or rank(plan) < rank(self.best):
            self.best = plan
        return True

    def has_fit(self) -> bool:
        """Whether a plan fits the memory."""
        return self.best is not None and self.best.fits

    def is_beaten(self, least_seconds: float) -> bool:
        """Whether a plan that fits is faster than a step that takes at least so long."""
        return self.best is not None and self.best.fits and _rounded(least_seconds) > _rounded(self.best.step_seconds)

    def result(self) -> list[Plan]:
        """All plans. Raises an error where there is none."""
        if not self.plans:
            assert self._failure is not None, "a configuration allows something"
            raise self._failure
        return self.plans


def _fullness(error: PartitionError | ScheduleError) -> float:
    return error.fullness if isinstance(error, PartitionError) else math.inf


def _try_meshes(tries: _Tries, config: PipelineConfig) -> None:
    """Try the meshes with few micro-batches, and more micro-batches for the best mesh as long as they help.

    If nothing fits the memory with few, the longest pipelines, which need the least, get more and so smaller ones. Once
    one fits, other meshes are tried with as many.
    """
    planner = tries.planner
    few = few_micro_batches(planner, config.num_micro_batches, config.processes)
    more = [count for count in micro_batch_counts(planner.rows, config.num_micro_batches) if count > max(few)]
    _try_counts(tries, config, few)
    is_free = config.num_stages == config.replicas == AUTO and config.processes <= planner.num_layers
    longest = replace(config, replicas=1) if is_free else config
    while more and not tries.has_fit() and more[0] * config.processes < MOST_ACTIONS:
        count = more.pop(0)
        _try_counts(tries, longest, [count])
        if is_free and tries.has_fit():
            _try_counts(tries, config, [count])
    if tries.best is None:
        return
    _exchange(tries, config)
    for count in more:
        best = tries.best
        tries.add(
            best.settings.replaced(num_micro_batches=count, recompute=config.recompute, partition=config.partition)
        )
        if tries.best is best:
            break


def _try_counts(tries: _Tries, config: PipelineConfig, counts: Sequence[int]) -> None:
    """Try the meshes with some numbers of micro-batches, those whose steps may be the shortest first, until no other
    can be faster.

    One schedule comes first, then the others. Where there are many processes the work is limited, so the last meshes of
    the order may be left out.
    """
    planner = tries.planner
    schedules = AUTO_SCHEDULES if config.schedule == AUTO else (config.schedule,)
    room = MOST_ACTIONS
    tried: list[tuple[tuple[float, ...], float, PipelineConfig]] = []
    for bound, one in meshes(planner, config, counts):
        is_enough = room < 0 and tries.best is not None and (tries.best.fits or room < -MOST_ACTIONS)
        if tries.is_beaten(bound) or is_enough:
            continue
        if tries.add(replace(one, schedule=schedules[0])):
            tried.append((rank(tries.plans[-1]), bound, one))
        room -= num_actions(planner, one)
    room = MOST_ACTIONS
    for _, bound, one in sorted(tried, key=lambda each: each[0]):
        for schedule in schedules[1:]:
            is_asked = config.schedule != AUTO or _is_worth_a_try(schedule, one)
            if room < 0 or not is_asked or tries.is_beaten(bound):
                continue
            tries.add(replace(one, schedule=schedule))
            room -= num_actions(planner, one)


def _exchange(tries: _Tries, config: PipelineConfig) -> None:
    """Exchange two unlike processes of the best plan as long as that helps."""
    planner, room, before = tries.planner, MOST_ACTIONS, None
    kinds = kinds_of(planner.memory_bytes, planner.speeds, config.processes)
    while tries.best is not None and tries.best is not before:
        before = tries.best
        again = before.settings.replaced(recompute=config.recompute, partition=config.partition)
        for placement in exchanges(before.timeline.schedule.placement, kinds):
            if room > 0:
                tries.add(replace(again, placement=str(placement)))
                room -= num_actions(planner, again)


def num_actions(planner: Planner, config: PipelineConfig) -> int:
    """About how many actions a table has: the work of its simulation."""
    num_stages, _ = config.mesh
    assert isinstance(config.num_micro_batches, int), "it is decided"
    return 3 * num_stages * planner.micro_batches_of_step(config.num_micro_batches)


def _plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The plan of a configuration that leaves at most its partition and its recomputation open.

    They depend on each other: a split is balanced for what is recomputed, and what is recomputed is what the split
    leaves no room for. If nothing need be recomputed, this and the leanest recomputation are split for, and
    the better split is taken. Otherwise the leanest recomputation is split for first, and then twice what was chosen.
    """
    is_auto = config.recompute == AUTO
    num_stages, _ = config.mesh
    even = tuple(map(len, cut(planner.num_layers, num_stages)))
    settings = config.decided(partition=even, recompute="none" if is_auto else config.recompute)
    if not is_auto:
        return planner.plan(replace(settings, partition=choose_partition(planner, settings, config.partition)))
    try:
        plan = planner.plan(replace(settings, partition=choose_partition(planner, settings, config.partition)))
        if plan.fits:
            lean = choose_partition(planner, replace(settings, recompute="stage"), config.partition)
            return min(planner.plan(replace(settings, partition=lean)), plan, key=rank)
    except PartitionError:
        pass
    settings = replace(settings, recompute="stage")
    settings = replace(settings, partition=choose_partition(planner, settings, config.partition))
    plans = []
    for _ in range(2):
        settings = replace(settings, recompute=choose_recompute(planner, settings))
        plans.append(planner.plan(settings))
        if config.is_cut_by_cost:
            try:
                settings = replace(settings, partition=choose_partition(planner, settings, config.partition))
            except PartitionError:
                break
    return min(plans, key=rank)


def _allowed(planner: Planner, config: PipelineConfig) -> Iterator[PipelineConfig]:
    """The configuration with its schedule and M decided, in every way that is worth a try.

    Raises:
        UserError: M is "auto", and a step has too few rows for the replicas of a stage.
    """
    schedules = AUTO_SCHEDULES if config.schedule == AUTO else (config.schedule,)
    num_stages, replicas = config.mesh
    counts = micro_batch_counts(planner.rows, config.num_micro_batches)
    if config.num_micro_batches == AUTO:
        # Every replica gets a micro-batch in every step.
        fewest = max(replicas_of(num_stages, replicas))
        steps = [planner.micro_batches_of_step(count) for count in counts]
        if fewest > max(steps):
            raise UserError(too_few_rows(max(steps), fewest))
        counts = [count for count, step in zip(counts, steps, strict=True) if step >= fewest]
    for schedule in schedules:
        if config.schedule == AUTO and not _is_worth_a_try(schedule, config):
            continue
        for num_micro_batches in counts:
            yield replace(config, schedule=schedule, num_micro_batches=num_micro_batches)


def _is_worth_a_try(schedule: str, config: PipelineConfig) -> bool:
    """Whether "auto" considers a schedule: it can run on the processes, and is not another one there."""
    num_stages, replicas = config.mesh
    if schedule == "interleaved_1f1b":
        return config.processes < config.places
    if schedule not in SPLIT_SCHEDULES:
        return True
    # A compiled block has one backward, and in one process no other waits for I.
    if config.torch_compile or config.places == num_stages * config.processes:
        return False
    if schedule in V_SHAPED:
        is_uniform = len(set(replicas_of(num_stages, replicas))) == 1
        return is_uniform and config.places == 2 * config.processes and config.placement is None
    return config.places == config.processes


def micro_batch_counts(rows: int, asked: int | str) -> list[int]:
    """The numbers of micro-batches that "auto" chooses from: the powers of two up to one per row, and one per row."""
    if isinstance(asked, int):
        return [asked]
    return sorted({rows, *(2**power for power in range(rows.bit_length()))})


def few_micro_batches(planner: Planner, asked: int | str, num_processes: int) -> list[int]:
    """Those of `micro_batch_counts` for which meshes of so many processes are compared; at least one."""
    least, most = (share * num_processes for share in _MICRO_BATCHES_A_PROCESS)
    counts = micro_batch_counts(planner.rows, asked)
    return [count for count in counts if least <= count <= most] or [min(counts, key=lambda count: abs(count - most))]


def rank(plan: Plan) -> tuple[float, ...]:
    """Sort key: the best plan has the smallest."""
    if not plan.fits:
        return (1.0, plan.fullness)
    # A gain below the model's own error is none: then the fewer messages and the less memory.
    return (0.0, _rounded(plan.step_seconds), plan.settings.num_micro_batches, plan.peak_bytes)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def choose_partition(planner: Planner, settings: DecidedConfig, strategy: str | Sequence[int]) -> tuple[int, ...]:
    """The number of layers of each stage.

    Args:
        planner: of the model.
        settings: their schedule, M, recompute and processes say what a stage costs and holds; not their partition.
        strategy: "count", "parameters", "flops", "profile" (seconds, which must have been measured), "auto" (seconds,
            measured or not), or a list.

    Raises:
        PartitionError: no split meets the planner's limit of memory, or `partition` raises it.
    """
    num_micro_batches = settings.num_micro_batches
    costs = planner.costs(num_micro_batches)
    if strategy not in (*COST_STRATEGIES, AUTO):
        return tuple(len(stage) for stage in cut(len(costs.layers), settings.num_stages, strategy))
    cut(len(costs.layers), settings.num_stages)
    sums = planner.sums(num_micro_batches)
    if strategy == "profile" and not costs.is_measured:
        raise PartitionError(
            "partition 'profile' needs measured layers, and none were measured; plan with --profile, or use flops."
        )
    table, bound = planner.table(settings), planner.memory_bound(settings)
    shares, inner = recompute_shares(table), inner_recompute(settings)
    placement = table.placement
    # Of r replicas the busiest runs M / r micro-batches, rounded up; the others wait for the slowest.
    of_replica = [
        -(-table.num_micro_batches // count) / table.num_micro_batches / speed
        for count, speed in zip(placement.replicas, speeds_of(planner.speeds, placement), strict=True)
    ]

    def seconds(stage: int, start: int, stop: int) -> float:
        return of_replica[stage] * sums.seconds(start, stop, inner[stage]).of_micro_batch(shares[stage])

    def flops(stage: int, start: int, stop: int) -> float:
        forwards = (1 + shares[stage]) * sums.forward_flops(start, stop)
        return of_replica[stage] * (forwards + sums.backward_flops(start, stop))

    def parameters(_: int, start: int, stop: int) -> float:
        return sums.held(start, stop).num_bytes

    caps = _caps(planner, placement)
    largest = max(caps, default=0.0)

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        # As if every stage had the largest limit of all.
        own = largest / caps[stage] if caps else 1.0
        return own * bound.stage_bytes(stage, StageLayers(start, stop, inner[stage]))

    cost = {"parameters": parameters, "flops": flops}.get(str(strategy), seconds)
    boundaries = [layer.input_bytes for layer in costs.layers]
    # A run of layers may keep less than a part of it by as much as its ends' boundaries differ.
    dip = 2 * planner.micro_batches_of_step(num_micro_batches) * (max(boundaries) - min(boundaries[1:], default=0))
    dip_bytes = dip * (1 + planner.device.reserved_share) * (largest / min(caps) if caps else 1.0)
    try:
        return by_cost(
            planner.num_layers,
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
            f"({limit_text(limit)}{' each, which the stages of a process share' * isinstance(limit, int)}): the least "
            f"demanding one needs {error.fullness:.2f} times as much; allow that much, or use more stages or smaller "
            "micro-batches.",
            error.fullness,
        ) from None


def _caps(planner: Planner, placement: Placement) -> list[float]:
    """For each stage the most bytes that it may need, where a process's stages share its memory evenly."""
    caps = []
    for own, limit in zip(placement.workers, limits_of(planner.memory_bytes, placement), strict=True):
        if limit is None:
            return []
        caps.append(limit / max(len(placement.stages_of(process)) for process in own))
    return caps
