"""Ways to run a model whose weights visit its devices, which are tried where a configuration leaves them open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.losses.loss import Loss
from hf_gpipe.modes.visits.round_robin import ROUND_ROBIN, deal_of, dealt_table
from hf_gpipe.planner.layout import costs_of_table, with_updates_of_run
from hf_gpipe.planner.plan import Plan, Planner, best_of
from hf_gpipe.planner.search.cut import Outcome, outcome_of
from hf_gpipe.planner.search.listed import TABLE_FILE, each_stage, with_table_file
from hf_gpipe.planner.workload import Workload
from hf_gpipe.schedule import Schedule, check_table, simulate
from hf_gpipe.settings.mode import AUTO, Visitors
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig

#: The recipe's key for the weights that visit, for messages.
SETTING = "offload_weights"
_BREADTH_FIRST = "breadth_first"
#: The divisors of the number of layers that give the numbers of stages to try, and micro-batches for each process.
_STAGES, _MICRO_BATCHES = (1, 2), (1, 2, 4)
#: The most stages of a slot that are tried; None: as many as take equal time.
_SLOTS = None, 3, 2, 1
#: The number of tables of each kind that are planned until a table fits: more rounds need less memory.
_TRIES = 3
#: The numbers of rounds that are tried; None: the best number where copies and updates take no time.
_ROUNDS = None, 1, 2, 3, 4, 6, 8, 12, 16


def possible(adapter: Adapter, loss: Loss, mini_batch: Workload) -> Iterator[str]:
    """Yield the fields of these modes that a model, its loss and its rows allow."""
    # Layers in 8 bits keep the device's memory.
    if adapter.quantisation is None or not adapter.quantisation.config.load_in_8bit:
        yield "visits"
    # The last stage must be in one place for such a loss, and so must what a BatchNorm counts.
    if not loss.compares_units and not mini_batch.entries:
        yield "shared_stages"


def possible_visitors(planner: Planner) -> Sequence[Visitors]:
    """The weights that may visit, the fewest first; empty on a CPU, which has one memory."""
    if "visits" not in planner.possible or not planner.device.has_host:
        return ()
    total = planner.known_costs.total
    return ("all",) if total.trainable_bytes > total.num_bytes / 2 else ("frozen", "all")


def open_visitors(planner: Planner) -> Sequence[Visitors]:
    """The weights that `offload_weights: auto` may let visit."""
    return possible_visitors(planner) if planner.division.is_whole else ()


def untried(config: PipelineConfig | None, plans: Sequence[Plan]) -> str:
    """A sentence where `open_visitors` has left out, for one of some plans, what a run could do; else empty."""
    is_open = config is None or config.visits.offload_weights == AUTO
    if not is_open or all(plan.planner.division.is_whole for plan in plans):
        return ""
    return (
        "where layers are divided, weights that visit are not tried, for a stage has the memory of several devices "
        f"already; set pipeline.{SETTING} to plan them"
    )


def way(plan: Plan) -> str:
    """The recipe's key and value, where weights of a plan visit; else empty."""
    if (visitors := plan.settings.visits.offload_weights) is None:
        return ""
    order = ROUND_ROBIN if plan.timeline.schedule.placement.is_shared else _BREADTH_FIRST
    return f"{SETTING}={visitors}, {order}"


def fixes(planner: Planner, settings: DecidedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield keys with which weights visit the same GPUs, in stages as small as possible, and words for them."""
    num_stages = planner.num_layers // settings.num_processes * settings.num_processes
    is_on = settings.visits.offload_weights is not None
    if is_on or settings.replicas != 1 or num_stages < 3 * settings.num_processes:
        return
    for visitors in possible_visitors(planner)[:1]:
        change = {SETTING: visitors, "num_stages": num_stages, "schedule": _BREADTH_FIRST}
        yield "with weights in CPU memory", change | {"recompute": "stage", "partition": "count"}


def ways(planner: Planner, config: PipelineConfig) -> Iterator[tuple[Planner, PipelineConfig]]:
    """Yield the configuration with its `offload_weights` decided in every way that is worth a try."""
    if config.visits.offload_weights != AUTO:
        yield planner, config
        return
    # All weights of shared stages visit.
    for visitors in ("all",) if config.schedule == ROUND_ROBIN else (None, *open_visitors(planner)):
        stay = 0 if visitors is None else config.visits.resident_stages or AUTO
        yield planner, config.replace(offload_weights=visitors, resident_stages=stay)


def outcomes(planner: Planner, asked: PipelineConfig, counts: Sequence[int]) -> list[Outcome] | None:
    """The outcomes that are worth a try where weights visit; None: they do not, or nothing is open. The arguments and
    the error are those of `visiting_ways`."""
    if not asked.visits.offload_weights or asked.is_decided:
        return None
    found: list[Outcome] = []
    for config in visiting_ways(planner, asked, counts):
        # Stages are on their device in turn; whether they fit, the plan says.
        outcome = outcome_of(planner.within(None), config)
        if isinstance(outcome, Plan):
            outcome = with_dealt_table(replace(outcome, planner=planner), asked)
        found.append(outcome)
    plans = [outcome for outcome in found if isinstance(outcome, Plan)]
    return [*found, with_stages_that_stay(best_of(*plans))] if plans and asked.visits.resident_stages == AUTO else found


def with_stages_that_stay(plan: Plan) -> Plan:
    """The plan with as many stages that stay on their device as fit, if it is better: each of them saves copies."""
    best, settings, placement = plan, plan.settings, plan.timeline.schedule.placement
    # At least three visit.
    least, most = 0, min(len(placement.stages_of(worker)) for worker in range(placement.num_processes)) - 3
    if placement.is_shared or not plan.fits:
        return plan
    while least < most:
        count = (least + most + 1) // 2
        try:
            found = plan.planner.plan(settings.replace(resident_stages=count))
        except ScheduleError:  # the schedule would have all of the others there at once
            most = count - 1
            continue
        if found.fits:
            best, least = best_of(best, found), count
        else:
            most = count - 1
    return best


def visiting_ways(planner: Planner, config: PipelineConfig, counts: Sequence[int]) -> Iterator[PipelineConfig]:
    """The configurations that are worth a try, with K, M, replicas, schedule and recomputation decided.

    Args:
        planner: the planner of the model.
        config: the configuration, whose `offload_weights` is frozen or all, and which leaves something open.
        counts: the numbers of micro-batches that are possible.

    Raises:
        UserError: no number of stages is possible.
    """
    size = config.processes
    # Each replica is a pipeline of its own.
    own_size = max(size // config.replicas, 1) if isinstance(config.replicas, int) else size
    if config.schedule != AUTO:
        schedules: tuple[str, ...] = (config.schedule,)
    else:
        # The workers that share stages share memory.
        can_deal = (
            config.visits.offload_weights == "all"
            and "shared_stages" in planner.possible
            and not config.excluding("shared_stages")
        )
        schedules = (_BREADTH_FIRST, *([ROUND_ROBIN] if can_deal and planner.host_size(size) % own_size == 0 else ()))
    if config.num_micro_batches == AUTO:
        wanted = [times * size for times in _MICRO_BATCHES]
        counts = sorted(
            {min((possible for possible in counts if possible >= number), default=counts[-1]) for number in wanted}
        )
    is_possible = False
    for schedule in schedules:
        for num_stages in _numbers_of_stages(planner, config, schedule, own_size):
            for count in counts:
                is_possible = True
                yield config.on_mesh(
                    num_stages,
                    1 if isinstance(config.replicas, str) else config.replicas,
                    num_micro_batches=count,
                    schedule=schedule,
                    recompute="stage" if config.recompute == AUTO else config.recompute,
                    resident_stages=0 if config.visits.resident_stages == AUTO else config.visits.resident_stages,
                )
    if not is_possible:
        raise UserError(
            f"{SETTING} is {config.visits.offload_weights} and num_stages auto: a model of {planner.num_layers} layers "
            f"has not the three stages for each of {own_size} processes that {_BREADTH_FIRST} takes; use fewer "
            f"processes, or {SETTING} all with schedule {ROUND_ROBIN}"
        )


def _numbers_of_stages(planner: Planner, config: PipelineConfig, schedule: str, size: int) -> Sequence[int]:
    if config.num_stages != AUTO:
        return (int(config.num_stages),)
    most = planner.num_layers
    if schedule == ROUND_ROBIN:
        return sorted({max(most // part, size) for part in _STAGES}) if most >= size else ()
    # Stages are assigned in turn, so their number is a multiple of the processes.
    return sorted({most // part // size * size for part in _STAGES if most // part >= 3 * size})


def with_dealt_table(plan: Plan, asked: PipelineConfig) -> Plan:
    """The better of a plan whose stages are shared and the plan with slots by its own seconds.

    The builder assumes that all stages are equal, and that copies and updates take no time. Where something was
    open, slots follow from the plan's seconds: a stage whose forward or backward is long has a slot of its own. Fewer
    rounds load weights less often, and leave more backwards beside which stages are updated. Where a device has no room
    for the weights of two such slots, they have fewer stages.
    """
    settings, table = plan.settings, plan.timeline.schedule
    if asked.is_decided or table.name != ROUND_ROBIN or len(table.placement.pipeline_of(0)) == 1:
        return plan
    costs = costs_of_table(plan.layout)
    forward, again, backward = map(each_stage, (costs.forward_seconds, costs.recompute_seconds, costs.backward_seconds))
    best, tables = plan, set[Schedule]()

    def seconds(made: Schedule) -> tuple[float, int]:
        total = simulate(with_updates_of_run(made, plan.planner.inputs), costs).total_seconds
        return float(total), sum(len(row) for row in made.actions)

    most_rounds = table.num_micro_batches // len(table.placement.workers[0]) // len(table.placement.pipeline_of(0))
    for most in _SLOTS:
        size = table.placement, table.num_micro_batches
        rounds = [number for number in _ROUNDS if (number or 0) <= most_rounds]
        deals = [deal_of(*size, forward, again, backward, most, number) for number in rounds]
        every = {dealt_table(*size, deal, TABLE_FILE) for deal in deals}
        for made in sorted(every - tables, key=seconds)[:_TRIES]:
            tables.add(made)
            check_table(made)
            best = best_of(best, with_table_file(plan, settings, made, made_by=ROUND_ROBIN))
            if best.fits:
                return best
    return best
