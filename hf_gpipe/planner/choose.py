"""The choice of what a configuration leaves open: the fastest plan that fits.

`best_plan` tries each schedule and M that the configuration allows. For each it chooses where to cut the model and what
to recompute. `search` also tries other K, and shows more than the best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.partition import COST_STRATEGIES, by_cost
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs import InnerRecompute
from hf_gpipe.planner.memory import MemoryBound, StageLayers
from hf_gpipe.planner.plan import Plan, Planner, inner_recompute, recompute_shares, stage_layers
from hf_gpipe.recipe import AUTO, DecidedConfig, PipelineConfig, RecomputeChoice
from hf_gpipe.schedule import SPLIT_SCHEDULES, V_SHAPED
from hf_gpipe.schedule.occupancy import Held

AUTO_SCHEDULES = ("1f1b", "gpipe_fused", "gpipe", "interleaved_1f1b", *SPLIT_SCHEDULES)
"""The schedules that "auto" chooses from. Of equally good ones the first is chosen."""

#: Stages of one process that a search tries.
_STAGES_A_PROCESS = (1, 2)


def best_plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The fastest plan that a configuration allows and that fits; where none does, the one that needs the least memory.

    Args:
        planner: of the model, its mini-batch and its device.
        config: K, and for all else a value or "auto". The limit of memory is the planner's.

    Raises:
        PartitionError: the partition is by cost, and no split of any allowed plan meets the limit.
        UserError: another of its kinds, for what no pipeline could do.
    """
    found: Plan | None = None
    failure: UserError | None = None
    for one in _allowed(planner, config):
        try:
            plan = _plan(planner, one)
        except (PartitionError, ScheduleError) as error:
            failure = failure or error
            continue
        if found is None or _rank(plan) < _rank(found):
            found = plan
    if found is None:
        assert failure is not None, "a configuration allows something"
        raise failure
    return found


def _plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The plan of a configuration that leaves at most its partition and its recomputation open.

    They depend on each other: a split is balanced for what is recomputed, and what is recomputed is what the split
    leaves no room for. So the leanest recomputation is split for first, and then twice what was chosen.
    """
    is_auto = config.recompute == AUTO
    even = tuple(map(len, cut(planner.num_layers, config.num_stages)))
    settings = config.decided(partition=even, recompute="stage" if is_auto else config.recompute)
    settings = replace(settings, partition=choose_partition(planner, settings, config.partition))
    if not is_auto:
        return planner.plan(settings)
    plans = []
    for _ in range(2):
        settings = replace(settings, recompute=choose_recompute(planner, settings))
        plans.append(planner.plan(settings))
        if config.is_cut_by_cost:
            try:
                settings = replace(settings, partition=choose_partition(planner, settings, config.partition))
            except PartitionError:
                break
    return min(plans, key=_rank)


def _allowed(planner: Planner, config: PipelineConfig) -> Iterator[PipelineConfig]:
    """The configuration with its schedule and M decided, in every way that is worth a try."""
    schedules = AUTO_SCHEDULES if config.schedule == AUTO else (config.schedule,)
    for schedule in schedules:
        if config.schedule == AUTO and not _is_worth_a_try(schedule, config, config.num_stages):
            continue
        for num_micro_batches in micro_batch_counts(planner.rows, config.num_micro_batches):
            yield replace(config, schedule=schedule, num_micro_batches=num_micro_batches)


def _is_worth_a_try(schedule: str, config: PipelineConfig, num_stages: int) -> bool:
    """Whether a schedule can run so many stages on the configuration's processes, and is not another one there."""
    is_uniform = isinstance(config.replicas, int)
    places = num_stages * config.replicas if isinstance(config.replicas, int) else sum(config.replicas)
    if schedule == "interleaved_1f1b":
        return config.processes < places
    if schedule not in SPLIT_SCHEDULES:
        return True
    # A compiled block has one backward, and in one process no one waits for I.
    if config.torch_compile or places == num_stages * config.processes:
        return False
    return is_uniform and places == 2 * config.processes if schedule in V_SHAPED else places == config.processes


def micro_batch_counts(rows: int, asked: int | str) -> list[int]:
    """The numbers of micro-batches that "auto" chooses from: the powers of two up to one per row, and one per row."""
    if isinstance(asked, int):
        return [asked]
    return sorted({rows, *(2**power for power in range(rows.bit_length()))})


def _rank(plan: Plan) -> tuple[float, ...]:
    """Sort key: the best plan has the smallest."""
    if not plan.fits:
        return (1.0, plan.peak_bytes)
    # A gain below the model's own error is none: then the fewer messages and the less memory.
    return (0.0, float(f"{plan.step_seconds:.3g}"), plan.settings.num_micro_batches, plan.peak_bytes)


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
    # Of r replicas the busiest runs M / r micro-batches, rounded up.
    of_replica = [-(-table.num_micro_batches // count) / table.num_micro_batches for count in placement.replicas]

    def seconds(stage: int, start: int, stop: int) -> float:
        return of_replica[stage] * sums.seconds(start, stop, inner[stage]).of_micro_batch(shares[stage])

    def flops(stage: int, start: int, stop: int) -> float:
        forwards = (1 + shares[stage]) * sums.forward_flops(start, stop)
        return of_replica[stage] * (forwards + sums.backward_flops(start, stop))

    def parameters(_: int, start: int, stop: int) -> float:
        return sums.held(start, stop).num_bytes

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        return bound.stage_bytes(stage, StageLayers(start, stop, inner[stage]))

    cost = {"parameters": parameters, "flops": flops}.get(str(strategy), seconds)
    most_stages = max(len(placement.stages_of(process)) for process in range(placement.num_processes))
    cap = None if planner.memory_bytes is None else planner.memory_bytes / most_stages
    boundaries = [layer.input_bytes for layer in costs.layers]
    # A run of layers may keep less than a part of it by as much as its ends' boundaries differ.
    dip = 2 * planner.micro_batches_of_step(num_micro_batches) * (max(boundaries) - min(boundaries[1:], default=0))
    return by_cost(
        planner.num_layers,
        settings.num_stages,
        cost,
        memory_bytes,
        cap,
        memory_dip_bytes=dip * (1 + planner.device.reserved_share),
    )


def choose_recompute(planner: Planner, settings: DecidedConfig) -> RecomputeChoice:
    """For each stage the largest number of live graphs that fits the planner's limit.

    Each graph above the first spares the recomputation of a micro-batch. Where not even one whole graph fits, the stage
    recomputes its blocks instead, if that needs less.

    Args:
        planner: of the model.
        settings: with the partition; their recompute is not read.

    Returns:
        "none" where nothing need be recomputed, else an entry for each stage. It may not fit: then nothing does.
    """
    if planner.memory_bytes is None:
        return "none"
    settings = replace(settings, recompute="none")
    bound, layers = planner.memory_bound(settings), stage_layers(settings)
    placement = planner.table(settings).placement
    entries: list[str | int] = ["none"] * settings.num_stages
    for process in range(placement.num_processes):
        room = _Room(bound, layers, placement.stages_of(process))
        for stage, entry in room.fill(planner.memory_bytes).items():
            entries[stage] = entry
    return "none" if set(entries) == {"none"} else tuple(entries)


class _Room:
    """The memory that the stages of one process need, as they are allowed more live graphs."""

    def __init__(self, bound: MemoryBound, layers: Sequence[StageLayers], own: Sequence[int]) -> None:
        self._bound, self._layers = bound, layers
        self._live = dict.fromkeys(own, 1)
        self._inner: dict[int, InnerRecompute] = dict.fromkeys(own, "none")

    def fill(self, limit_bytes: int) -> dict[int, str | int]:
        """The most live graphs of each stage; "none" where that is as many as it ever has, or "block"."""
        for stage in self._live:
            if self._needed() > limit_bytes:
                self._try_blocks(stage)
        # In turn, so that no stage recomputes everything while another recomputes nothing.
        growing = [stage for stage in self._live if self._inner[stage] == "none"]
        while growing and self._needed() <= limit_bytes:
            growing = [stage for stage in growing if self._grow(stage, limit_bytes)]
        return {stage: self._entry(stage) for stage in self._live}

    def _grow(self, stage: int, limit_bytes: int) -> bool:
        """Allow a stage one graph more; False where it needs none, or there is no room."""
        if self._live[stage] >= self._most(stage):
            return False
        self._live[stage] += 1
        if self._needed() <= limit_bytes:
            return True
        self._live[stage] -= 1
        return False

    def _try_blocks(self, stage: int) -> None:
        """Recompute a stage's blocks, with as many graphs of their inputs as the table has, where this needs less."""
        before = self._needed()
        self._live[stage], self._inner[stage] = self._most(stage), "block"
        if self._needed() >= before:
            self._live[stage], self._inner[stage] = 1, "none"

    def _entry(self, stage: int) -> str | int:
        if self._inner[stage] == "block":
            return "block"
        return "none" if self._live[stage] >= self._most(stage) else self._live[stage]

    def _most(self, stage: int) -> int:
        """How many live graphs a stage ever has."""
        return self._bound.most[stage][Held.GRAPH]

    def _needed(self) -> float:
        parts = []
        for stage, live in self._live.items():
            layers = replace(self._layers[stage], inner=self._inner[stage])
            parts.append(self._bound.parts(stage, layers, live))
        # One action works at a time, so the largest working memory of all stages is enough.
        return sum(kept for kept, _ in parts) + max(working for _, working in parts)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        fastest: the plans that fit, the fastest first; of each schedule and recomputation the best only.
        leanest: the plan that needs the least memory.
        num_tried: how many plans there were.
    """

    fastest: tuple[Plan, ...]
    leanest: Plan
    num_tried: int


def search(planner: Planner, config: PipelineConfig) -> Found:
    """Try K, M, schedule, recomputation and partition on the configuration's number of processes.

    K is one or two stages per process, M every power of two up to one micro-batch per row, and one per
    row; the configuration's own values are among those tried.

    Raises:
        PartitionError: there is no split at all.
    """
    plans: list[tuple[PipelineConfig, Plan]] = []
    failure: Exception | None = None
    for one in _configs(planner, config):
        try:
            plans.append((one, best_plan(planner, one)))
        except (PartitionError, ScheduleError) as error:
            failure = failure or error
    if not plans:
        assert failure is not None, "a search tries something"
        raise failure
    best: dict[tuple[str, object], Plan] = {}
    for asked, plan in sorted(plans, key=lambda one: (one[1].step_seconds, one[1].peak_bytes)):
        if plan.fits:
            best.setdefault((asked.schedule, asked.recompute), plan)
    leanest = min((plan for _, plan in plans), key=lambda plan: (plan.peak_bytes, plan.step_seconds))
    return Found(tuple(best.values()), leanest, len(plans))


def _configs(planner: Planner, config: PipelineConfig) -> Sequence[PipelineConfig]:
    counts = {config.num_stages}
    # Replicas that are listed are of this many stages.
    of_replica = config.processes // config.replicas if isinstance(config.replicas, int) else config.num_stages
    if isinstance(config.replicas, int):
        counts |= {count * of_replica for count in _STAGES_A_PROCESS}
    micro_batches = set(micro_batch_counts(planner.rows, AUTO))
    if isinstance(config.num_micro_batches, int):
        micro_batches.add(config.num_micro_batches)
    found = []
    for num_stages in sorted(count for count in counts if count <= planner.num_layers):
        is_given = num_stages == config.num_stages and not isinstance(config.partition, str)
        for partition in dict.fromkeys((AUTO, "count", config.partition if is_given else AUTO)):
            for schedule in AUTO_SCHEDULES:
                if not _is_worth_a_try(
                    schedule, replace(config, num_stages=num_stages, num_processes=config.processes)
                ):
                    continue
                found += [
                    replace(
                        config,
                        num_stages=num_stages,
                        num_micro_batches=num_micro_batches,
                        schedule=schedule,
                        recompute=recompute,
                        partition=partition,
                        num_processes=config.processes,
                    )
                    for num_micro_batches in sorted(micro_batches)
                    for recompute in (AUTO, "block", "stage")
                ]
    return found
