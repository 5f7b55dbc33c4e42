"""The planner of a pipeline that runs: what it decides, the same in every process, and its prediction of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError
from hf_gpipe.job.facts import RankFacts, available_memory
from hf_gpipe.job.world import MeasuredLink, World
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.companion import OpenCompanion
from hf_gpipe.partition import partition as cut
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.measure import measure_speeds, profile_layers, rated_machine, steady_memory, this_machine
from hf_gpipe.planner.costs.model_costs import ModelCosts, mean_costs
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.machines.links import cluster_of, measure, measure_machines, pairs_to_measure, steady
from hf_gpipe.planner.machines.network import one_level
from hf_gpipe.planner.machines.processes import ALIKE, MemoryLimit
from hf_gpipe.planner.of_model import costs_of_members, planner_of
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.report import untried
from hf_gpipe.planner.search.choose import best_plan, micro_batch_counts
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.planner.workload import PlanInputs, Workload, largest_micro_batch
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.mesh import Mesh, ranks_of_workers
from hf_gpipe.schedule import Schedule
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mesh import UNSHARED
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig
from hf_gpipe.text import bytes_text, seconds_text, size_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planning:
    """The planner's inputs of a pipeline that runs, beside its configuration."""

    inputs: PlanInputs
    adapter: Adapter
    loss: Loss
    world: World
    companion: OpenCompanion | None = None
    """The model beside the trained one."""
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
        memory: MemoryLimit = config.memory_bytes
        if config.memory is None:
            hosts = self.world.hosts
            of_ranks = [steady_memory(rank.devices[0], hosts.count(rank.host)) for rank in self.world.ranks]
            limits = tuple(map(min, config.division.by_worker(of_ranks)))
            # One number where all are nearly equal.
            memory = min(limits) if max(limits) < ALIKE * min(limits) else limits

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
            measured: the costs with the seconds that were measured, of micro-batches or of members of groups.
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
            companion=self.companion,
            tracer=partial(self._tracer, config.division),
        )

    def _tracer(self, division: Division) -> LayerTracer:
        if division not in self.tracers:
            as_on_gpu = self.world.device.type == "cuda"
            self.tracers[division] = LayerTracer(self.adapter, loss=self.loss, as_on_gpu=as_on_gpu, division=division)
        return self.tracers[division]

    def _speeds(self, config: PipelineConfig) -> tuple[float, ...] | None:
        """The relative speed of each process, measured where the configuration asks for that, or where something is
        open and GPUs differ. None: all are as fast."""
        models = {rank.devices[0].model for rank in self.world.ranks}
        is_open = config.speeds is None and not config.is_decided
        if config.speeds != "profile" and not (is_open and len(models) > 1):
            return config.given_speeds
        mini_batch = self.world.from_main(lambda: self.inputs.mini_batch(self.adapter), Workload)
        count = config.num_micro_batches if isinstance(config.num_micro_batches, int) else 4 * config.processes
        workload = mini_batch.with_rows(largest_micro_batch(mini_batch.rows, count))
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
                for groups in cuts(config, mini_batch.target_tokens):
                    costs_of_members(mini_batch.with_rows(rows), groups, measure)
        return measured


def _shown(value: Any) -> str:
    """A value of a recipe, for a line of text."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)


def _why(plan: Plan, config: PipelineConfig) -> str:
    settings, planner, chosen = plan.settings, plan.planner, []
    if config.is_mesh_open:
        replicas = "-".join(map(str, plan.timeline.schedule.placement.replicas))
        chosen.append(f"{settings.num_stages} stages with {replicas} replicas")
        chosen += [f"placement {settings.placement!r}"] * (settings.placement is not None)
        chosen += [UNSHARED] * (config.shared_updates != settings.shared_updates)
    for name in config.left_open:
        value = getattr(settings, name)
        if value == TABLE_FILE:
            chosen.append("a table made for this plan")
        elif name not in ("num_stages", "replicas", "partition"):
            chosen.append(f"{name} {_shown(value)}")
    if config.is_cut_by_cost:
        chosen.append(f"partition {list(settings.partition)} ({config.partition})")
    limit = "no limit of memory is known" if planner.memory_bytes is None else f"the limit is {planner.limit_text}"
    words = [
        f"planner: {', '.join(chosen)}: a step of {seconds_text(plan.step_seconds)}, bubble {plan.bubble:.1%}, peak "
        f"memory {size_text(plan.peak_bytes)} in a process",
        f"{limit}{'' if plan.fits else ', which nothing allowed fits'}{plan.uncounted}",
        untried(config, plan),
    ]
    return "; ".join(filter(None, words))


# ---------------------------------------------------------------------- the machines that it is to run on

#: The factor by which a link must be slower than the planner assumed to make the planner's times worthless.
_MUCH_SLOWER = 2.0


def compare_with_machines(planning: Planning, config: DecidedConfig, world: Mesh) -> list[str]:
    """Check the memory that a plan needs, and measure its links. Every process calls it.

    It does nothing where all processes are on one machine, unless the configuration asks for `measure_links`.

    Returns:
        A line for each pair of machines with an edge between them: the measured link, and the planner's.

    Raises:
        UserError: on every process: a machine has less free memory than its processes need. Where the configuration
            gives `memory`, that counts as the free memory.
    """
    if not world.has_several_machines and not config.measure_links:
        return []
    peaks, assumed = world.from_main(lambda: _planned(planning, config), tuple[list[int], Level], takes_long=True)
    if peaks and config.memory is None and (lacking := memory_problems(world.ranks, peaks)):
        raise UserError("; ".join(lacking))
    return [_line(link, assumed) for link in measure(world, pairs_to_measure(world.placement, world.hosts))]


def _planned(planning: Planning, config: DecidedConfig) -> tuple[list[int], Level]:
    """The bytes that each process needs, empty where no example of a mini-batch is given, and the assumed link."""
    device = planning.device(config)
    assumed = (cluster_of(planning.world, device.link) or one_level(device, 1)).levels[-1]
    if planning.inputs.example is None:
        return [], assumed
    plan = planning.planner(config, decides=True).plan(config)
    ranks = range(plan.planner.division.num_ranks)
    return [process.memory.total for process in plan.processes for _ in ranks], assumed


def memory_problems(ranks: Sequence[RankFacts], peaks: Sequence[int]) -> list[str]:
    """A sentence for each machine that has too little free memory.

    Args:
        ranks: the facts of each process. On the CPU the processes of a machine share its memory.
        peaks: bytes that each process needs at the peak of a step.
    """
    of_memory: dict[tuple[str, int | None], list[int]] = {}
    for rank, facts in enumerate(ranks):
        of_memory.setdefault((facts.host, rank if facts.devices[0].is_gpu else None), []).append(rank)
    problems = []
    for (host, gpu), own in of_memory.items():
        need, there = sum(peaks[rank] for rank in own), sum(device.free_bytes for device in ranks[own[0]].devices)
        if gpu is None:
            there = min(ranks[rank].devices[0].free_bytes for rank in own)
        if need > there:
            who = f"its processes ({', '.join(map(str, own))}) need" if gpu is None else f"process {gpu} needs"
            has = f"{size_text(there)} are free" if gpu is None else f"its GPU has {size_text(there)} free"
            problems.append(
                f"machine {host}: {who} {size_text(need)} by the plan and {has}; end what else runs there, use more or "
                "smaller stages, recompute more, or set pipeline.memory to what there is for each process"
            )
    return problems


def _line(link: MeasuredLink, assumed: Level) -> str:
    first, second = link.hosts
    where = f"{first} - {second}" if first != second else f"inside {first}"
    text = (
        f"{where}, processes {link.ranks[0]} and {link.ranks[1]}: {bytes_text(link.bytes_per_second)}/s and "
        f"{seconds_text(link.latency_seconds)} for a small message; the planner assumes "
        f"{bytes_text(assumed.bytes_per_second)}/s and {seconds_text(assumed.latency_seconds)}"
    )
    if link.bytes_per_second * _MUCH_SLOWER < assumed.bytes_per_second:
        rate = f"{link.bytes_per_second / 1e6:.0f}MB/s+{link.latency_seconds * 1e6:.0f}us"
        text += f" (plan again with this link, for 2 machines of 4 devices: --devices 2x4@{rate},25GB/s)"
    return text
