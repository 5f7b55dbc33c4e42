"""The choice of "auto" values: the fastest way to run that fits. The same in every process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs import ModelCosts, mean_costs
from hf_gpipe.planner.plan import Plan, Planner, seconds_text
from hf_gpipe.planner.profile import profile_layers
from hf_gpipe.planner.recompute import choose_recompute
from hf_gpipe.planner.settings import PlanInputs
from hf_gpipe.planner.split import choose_partition
from hf_gpipe.planner.this_machine import this_machine
from hf_gpipe.planner.workload import largest_micro_batch
from hf_gpipe.recipe import AUTO, DecidedConfig, PipelineConfig
from hf_gpipe.recipe.sizes import size_text
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.topology import Topology

logger = logging.getLogger(__name__)

AUTO_SCHEDULES = ("1f1b", "gpipe_fused", "gpipe", "interleaved_1f1b")
"""The schedules that "auto" chooses from, the one with the least memory first."""


def decide(
    config: PipelineConfig,
    inputs: PlanInputs,
    adapter: Adapter,
    peft: PeftAdapter | None,
    loss: TokenLoss,
    topology: Topology,
) -> tuple[DecidedConfig, str | None]:
    """Decide what a configuration leaves open. Every process calls it; the main process decides for its own device.

    Args:
        config: of the pipeline; its limit of memory holds, or else the device's.
        inputs: the mini-batch and the optimizer.
        adapter: the model's.
        peft: PEFT layers that alone are trained.
        loss: of the target tokens.
        topology: the processes, and their devices.

    Returns:
        The decided configuration, and in one line what was chosen and why; None where nothing was open.

    Raises:
        UserError: on every process: there is no example, or nothing that could be run.
    """
    config = replace(config, num_processes=topology.num_processes)
    if config.is_decided:
        stages = cut(len(adapter.layers), config.num_stages, config.partition)
        return config.decided(partition=tuple(map(len, stages))), None
    measured = _measure(config, inputs, adapter, peft, loss, topology) if config.partition == "profile" else None

    def best() -> tuple[DecidedConfig, str]:
        plan = best_plan(planner_of(inputs, adapter, peft, loss, topology, measured), config)
        why = _why(plan, config)
        logger.info(why)
        return plan.settings, why

    return topology.from_reader(best)


def planner_of(
    inputs: PlanInputs,
    adapter: Adapter,
    peft: PeftAdapter | None,
    loss: TokenLoss,
    topology: Topology,
    measured: Mapping[int, ModelCosts] | None = None,
) -> Planner:
    """The planner of a pipeline, for the device of this process.

    Args:
        inputs, adapter, peft, loss, topology: as `decide` has them.
        measured: by the rows of a micro-batch, the costs with seconds.

    Raises:
        UserError: there is no example.
    """
    return Planner.of(
        adapter,
        inputs,
        this_machine(topology.device, topology.num_processes),
        peft=peft,
        loss=loss,
        as_on_gpu=topology.device.type == "cuda",
        measured=measured,
    )


def best_plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The fastest plan that a configuration allows and that fits; where none does, the one that needs the least memory.

    Args:
        planner: of the model, its mini-batch and its device.
        config: K, and for all else a value or "auto". Its limit of memory is the planner's where it is given.

    Raises:
        PartitionError: the partition is by cost, and no split of any allowed plan meets the limit.
        UserError: another of its kinds, for what no pipeline could do.
    """
    if config.memory_bytes is not None:
        planner = planner.within(config.memory_bytes)
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
        if schedule == "interleaved_1f1b" and config.schedule == AUTO and config.processes == config.places:
            continue
        for num_micro_batches in micro_batch_counts(planner.rows, config.num_micro_batches):
            yield replace(config, schedule=schedule, num_micro_batches=num_micro_batches)


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


def _why(plan: Plan, config: PipelineConfig) -> str:
    settings = plan.settings
    chosen = []
    if config.schedule == AUTO:
        chosen.append(f"schedule {settings.schedule}")
    if config.num_micro_batches == AUTO:
        chosen.append(f"num_micro_batches {settings.num_micro_batches}")
    if config.recompute == AUTO:
        entries = settings.recompute
        chosen.append(f"recompute {entries if isinstance(entries, str) else list(entries)}")
    if config.is_cut_by_cost:
        chosen.append(f"partition {list(settings.partition)} ({config.partition})")
    limit = plan.planner.memory_bytes
    fits = "no limit of memory is known" if limit is None else f"the limit is {size_text(limit)}"
    return (
        f"planner: {', '.join(chosen)}: a step of {seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, the "
        f"fullest process at {size_text(plan.peak_bytes)}; {fits}{'' if plan.fits else ', which nothing allowed fits'}"
    )


def _measure(
    config: PipelineConfig,
    inputs: PlanInputs,
    adapter: Adapter,
    peft: PeftAdapter | None,
    loss: TokenLoss,
    topology: Topology,
) -> dict[int, ModelCosts]:
    """The costs of each size of micro-batch that may be chosen, measured by all processes at once, as in a run."""
    mini_batch = topology.from_reader(inputs.mini_batch)
    measured = {}
    for count in micro_batch_counts(mini_batch.rows, config.num_micro_batches):
        rows = largest_micro_batch(mini_batch.rows, count)
        own = profile_layers(
            adapter,
            replace(mini_batch, rows=rows),
            topology.device,
            peft=peft,
            loss=loss,
            barrier=topology.barrier,
        )
        measured[rows] = mean_costs(topology.gather_objects(own))
    return measured
