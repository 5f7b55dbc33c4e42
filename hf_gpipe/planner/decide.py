"""The planner of a pipeline that runs: what it decides, the same in every process, and its prediction of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.job.facts import available_memory
from hf_gpipe.job.world import World
from hf_gpipe.losses.loss import Loss
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.measure import measure_speeds, profile_layers, rated_machine, steady_memory, this_machine
from hf_gpipe.planner.costs.model_costs import ModelCosts, mean_costs
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.machines.links import cluster_of, measure_machines, steady
from hf_gpipe.planner.machines.processes import ALIKE, MemoryLimit
from hf_gpipe.planner.of_model import each_chunk, planner_of
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.report import untried
from hf_gpipe.planner.search.choose import best_plan, micro_batch_counts
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.planner.workload import PlanInputs, Workload, largest_micro_batch
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.mesh import ranks_of_workers
from hf_gpipe.schedule import Schedule
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mesh import UNSHARED
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig
from hf_gpipe.text import seconds_text, size_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planning:
    """The planner's inputs of a pipeline that runs, beside its configuration."""

    inputs: PlanInputs
    adapter: Adapter
    loss: Loss
    world: World
    beside: tuple[str, Adapter] | None = None
    """A mode and the adapter of its own model."""
    tracers: dict[Division, LayerTracer] = field(default_factory=dict, repr=False)
    """The tracer by division of the layers. What was traced to decide tells the plans of the run too."""

    def decide(self, config: PipelineConfig) -> tuple[DecidedConfig, str | None, Schedule | None]:
        """Decide what a configuration leaves open. Every process calls it; the main process decides for its own device.

        Returns:
            The decided configuration; a line that says what was chosen and why, None where nothing was open; and the
            table, where it was made for the plan, or read from a file; else None.

        Raises:
            UserError: on every process: there is no example, or nothing that could be run.
        """
        config = config.replace(num_processes=config.division.workers_among(self.world.num_processes))
        config = config.replace(speeds=self._speeds(config))
        if config.is_decided:
            num_stages, _ = config.mesh
            stages = cut(len(self.adapter.layers), num_stages, config.partition, shares_last=config.shares_last_layer)
            return config.decided(partition=tuple(map(len, stages))), None, self.inputs.tables.get(config.schedule)
        if self.world.has_several_machines:
            measure_machines(self.world)
        measured = self._measure(config) if config.partition == "profile" else {}
        memory = self._memory_bytes(config.division) if config.memory is None else config.memory_bytes

        def best() -> tuple[DecidedConfig, str, str | None]:
            plan = best_plan(self.planner(config, measured, decides=True).within(memory), config)
            table = plan.planner.inputs.tables.get(plan.settings.schedule)
            return plan.settings, _why(plan, config), None if table is None else table.text()

        settings, why, text = self.world.from_main(best, tuple[DecidedConfig, str, str | None], takes_long=True)
        table = None if text is None else Schedule.from_text(text)
        if self.world.is_main:
            logger.warning(why)  # a level that is shown unless somebody asks for silence
        return settings, why, table

    def device(self, config: PipelineConfig) -> Device:
        """The device that decisions are made for, from its data sheet, so that equal machines decide the same.

        It is measured where the configuration asks for that, by the partition "profile".
        """
        of_machine = this_machine if config.partition == "profile" else rated_machine
        return of_machine(self.world.device, len(self.world.neighbours))

    def planner(
        self,
        config: PipelineConfig,
        measured: Mapping[Workload, ModelCosts] = MappingProxyType({}),
        *,
        decides: bool = False,
    ) -> Planner:
        """The planner for the device of this process and the configuration's limit of memory.

        Args:
            config: the configuration of the pipeline.
            measured: the costs with the seconds that were measured, of micro-batches or of chunks.
            decides: whether equal machines must decide the same: then it uses `device` and links in round numbers.

        Raises:
            UserError: there is no example.
        """
        device = self.world.device
        this = self.device(config) if decides else this_machine(device, len(self.world.neighbours))
        if decides and device.type == "cuda":
            # Rounded down by less than a sixteenth, so that a little less that is free changes no choice.
            free = available_memory()
            step = 1 << max(free.bit_length() - 5, 0)
            this = replace(this, host=replace(this.host, memory_bytes=free // step * step))
        cluster = cluster_of(self.world, this.link)
        return planner_of(
            self.adapter,
            self.inputs,
            this,
            config,
            loss=self.loss,
            as_on_gpu=device.type == "cuda",
            seconds=lambda workload, costs: measured.get(workload, costs),
            cluster=steady(cluster) if decides and cluster is not None else cluster,
            beside=self.beside,
            tracer=partial(self._tracer, config.division),
        )

    def _tracer(self, division: Division) -> LayerTracer:
        if division not in self.tracers:
            as_on_gpu = self.world.device.type == "cuda"
            self.tracers[division] = LayerTracer(self.adapter, loss=self.loss, as_on_gpu=as_on_gpu, division=division)
        return self.tracers[division]

    def _memory_bytes(self, division: Division) -> MemoryLimit:
        """The bytes of a device of each worker; one number where all are nearly equal."""
        hosts = self.world.hosts
        of_ranks = [steady_memory(rank.devices[0], hosts.count(rank.host)) for rank in self.world.ranks]
        limits = tuple(map(min, division.by_worker(of_ranks)))
        return min(limits) if max(limits) < ALIKE * min(limits) else limits

    def _speeds(self, config: PipelineConfig) -> tuple[float, ...] | None:
        """The relative speed of each process, measured where the configuration asks for that, or where something is
        open and GPUs differ. None: all are as fast."""
        models = {rank.devices[0].model for rank in self.world.ranks}
        is_open = config.speeds is None and not config.is_decided
        if config.speeds != "profile" and not (is_open and len(models) > 1):
            return config.given_speeds
        mini_batch = self.world.from_main(lambda: self.inputs.mini_batch(self.adapter), Workload)
        count = config.num_micro_batches if isinstance(config.num_micro_batches, int) else 4 * config.processes
        workload = mini_batch.of_rows(largest_micro_batch(mini_batch.rows, count))
        ranks = ranks_of_workers(self.world, config.division)
        speeds = measure_speeds(self.adapter, workload, self.world, self.loss, ranks)
        if self.world.is_main:
            logger.warning(
                "planner: all processes are equally fast"
                if speeds is None
                else f"planner: measured relative speeds of the processes: {list(speeds)}; to decide the same without "
                f"measuring, give pipeline.speeds={list(speeds)}"
            )
        return speeds

    def _measure(self, config: PipelineConfig) -> Mapping[Workload, ModelCosts]:
        """The costs of each size of micro-batch that may be chosen, measured by all processes at once, as in a run."""
        world = self.world
        mini_batch = world.from_main(lambda: self.inputs.mini_batch(self.adapter), Workload)
        ranks, measured = ranks_of_workers(world, config.division), dict[Workload, ModelCosts]()

        def measure(workload: Workload) -> ModelCosts:
            # Only the seconds differ between processes.
            costs = world.from_main(lambda: self._tracer(config.division).costs(workload), ModelCosts)
            own = profile_layers(
                self.adapter, workload, world.device, loss=self.loss, barrier=world.barrier, ranks=ranks, costs=costs
            )
            # The ranks of a worker wait for each other.
            everyone = [first for first, *_ in config.division.by_worker(world.gather_objects(own, ModelCosts))]
            # The seconds of a slower device are scaled to the first device's.
            measured[workload] = mean_costs(everyone, config.given_speeds)
            return measured[workload]

        for count in micro_batch_counts(mini_batch.rows, config.num_micro_batches):
            rows = largest_micro_batch(mini_batch.rows, count)
            for cuts in functions_of_modes("search", "cuts"):
                for chunks in cuts(config, mini_batch.target_tokens):
                    each_chunk(mini_batch.of_rows(rows), chunks, measure)
        return measured


def _shown(value: Any) -> str:
    """A value of a recipe, for a line of text."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)


def _why(plan: Plan, config: PipelineConfig) -> str:
    settings, planner = plan.settings, plan.planner
    replicas = "-".join(map(str, plan.timeline.schedule.placement.replicas))
    is_open, is_unshared = config.is_mesh_open, config.shared_updates != settings.shared_updates
    chosen = {
        f"{settings.num_stages} stages with {replicas} replicas": is_open,
        f"placement {settings.placement!r}": is_open and settings.placement is not None,
        UNSHARED: is_open and is_unshared,
    }
    for name in config.left_open:
        value = getattr(settings, name)
        is_made = value == TABLE_FILE
        text = "a table made for this plan" if is_made else f"{name} {_shown(value)}"
        chosen[text] = is_made or name not in ("num_stages", "replicas", "partition")
    chosen[f"partition {list(settings.partition)} ({config.partition})"] = config.is_cut_by_cost
    limit = "no limit of memory is known" if planner.memory_bytes is None else f"the limit is {planner.limit_text}"
    words = [
        f"planner: {', '.join(text for text, is_said in chosen.items() if is_said)}: a step of "
        f"{seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, peak memory {size_text(plan.peak_bytes)} in a "
        "process",
        f"{limit}{'' if plan.fits else ', which nothing allowed fits'}{plan.uncounted}",
        untried(config, plan),
    ]
    return "; ".join(filter(None, words))
