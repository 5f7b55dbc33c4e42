"""A plan: one way to run a model as a pipeline, with what every stage holds and needs, and how long a step takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Self

from hf_gpipe.errors import UserError
from hf_gpipe.partition import partition as cut
from hf_gpipe.partition import stages_of
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.planner.costs.model_costs import ModelCosts, typical
from hf_gpipe.planner.costs.stage_costs import NOTHING, Share, StageCosts, StageLayers
from hf_gpipe.planner.layout import Before, Layout, before_table, costs_of_table, table_of
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.machines.processes import MemoryLimit, Processes, library_bytes
from hf_gpipe.planner.memory import HostMemory, MemoryEstimate, estimate_memory, host_memory
from hf_gpipe.planner.workload import PlanInputs, largest_micro_batch
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import Placement, Schedule, Timeline, simulate
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.schedule.kinds import KINDS, Held, Resource
from hf_gpipe.schedule.messages import Link
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig
from hf_gpipe.text import seconds_text, size_text


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan."""

    number: int
    process: int
    layers: range
    first_layer: str
    last_layer: str
    num_parameters: int
    """The number of parameters that it holds, ties of other stages included."""
    recompute: str
    """"none", "block" or "stage", the most stored graphs, or "host"."""
    memory: MemoryEstimate
    """The memory that it would need as the only stage of its process."""
    busy_seconds: float
    """The seconds of its actions in a step."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds that a process spends in one step, by what it does; together they are the step."""

    forward: float
    recompute: float
    """The recomputation of whole stages, and that of blocks, which the backward makes."""
    backward: float
    """The backward, whole or in its two parts."""
    update: float
    bubble: float
    """Waiting, for other stages and for messages."""


@dataclass(frozen=True)
class ProcessPlan:
    """A process of a plan: its stages, what it holds at the peak, and how it spends a step."""

    number: int
    stages: tuple[int, ...]
    memory: MemoryEstimate
    time: TimeEstimate


@dataclass(frozen=True)
class Plan:
    """The prediction of one step by `Planner.plan`."""

    layout: Layout
    planner: Planner
    """It has the limits."""
    costs: ModelCosts
    timeline: Timeline
    memory: tuple[MemoryEstimate, ...]
    """The memory of each process."""
    before: Before

    def __repr__(self) -> str:
        settings, is_known = self.settings, self.planner.memory_bytes is not None
        fits = "it does not fit" if not self.fits else "it fits" if is_known else "no limit is known"
        return (
            f"Plan({settings.num_stages} stages, {settings.num_micro_batches} micro-batches, {settings.schedule}: "
            f"{seconds_text(self.step_seconds)} per step, bubble {self.bubble:.1%}, {size_text(self.peak_bytes)} in "
            f"process {self.fullest}, {fits})"
        )

    @property
    def settings(self) -> DecidedConfig:
        """The configuration."""
        return self.layout.settings

    @property
    def step_seconds(self) -> float:
        """The seconds from the first action to the last update; in a window the mean of its steps. A step with several
        updates from the same rollouts runs its table for each."""
        return sum(self.before) + self.planner.inputs.updates * self.table_seconds

    @property
    def table_seconds(self) -> float:
        """The seconds of the table alone, which has one update."""
        return float(self.timeline.total_seconds) / self.timeline.schedule.num_steps

    @property
    def bubble(self) -> float:
        """The idle fraction of all processes."""
        return float(self.timeline.bubble)

    @property
    def peak_bytes(self) -> int:
        """The memory estimate of the process with the highest peak."""
        return self.memory[self.fullest].total

    @property
    def uncounted(self) -> str:
        """The end of a sentence about `peak_bytes`: what they do not count; empty on GPUs, where they count all."""
        return "" if self.planner.device.has_host else "; torch and other libraries take CPU memory beside it"

    @cached_property
    def on_hosts(self) -> list[HostMemory]:
        """The CPU memory that each process needs."""
        return host_memory(self.layout, self.timeline)

    @property
    def hosted_bytes(self) -> list[int]:
        """The bytes that modes have in CPU memory, for each process."""
        return [own.hosted for own in self.on_hosts]

    @property
    def machine_bytes(self) -> int:
        """The most bytes of `hosted_bytes` on any machine, all of its processes together."""
        size, every = self.planner.host_size(len(self.memory)), self.hosted_bytes
        return self.planner.division.num_ranks * max(sum(every[n : n + size]) for n in range(0, len(every), size))

    @property
    def host_fullness(self) -> float:
        """The largest share of a machine's memory that `machine_bytes` needs; 0 where the memory is not known."""
        limit = self.planner.device.host.memory_bytes
        return 0.0 if limit is None else self.machine_bytes / max(limit, 1)

    @cached_property
    def processes(self) -> tuple[ProcessPlan, ...]:
        """All processes, in order."""
        placement = self.timeline.schedule.placement
        again = [
            self.layout.sums.again(stage.start, stage.stop, stage.inner) / speed
            for stage, speed in zip(self.layout.stages, self.planner.speeds_of(placement), strict=True)
        ]
        return tuple(
            ProcessPlan(number, placement.stages_of(number), memory, _time_of(self.timeline, number, again))
            for number, memory in enumerate(self.memory)
        )

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """All stages, in order."""
        layout, timeline, table, stages = self.layout, self.timeline, self.timeline.schedule, []
        entries = Recompute.parse(self.settings.recompute, table.num_stages).entries
        for number, (stage, workers) in enumerate(zip(layout.stages, table.placement.workers, strict=True)):
            # The process is the first replica's, which has the most micro-batches.
            is_alone = table.placement.stages_of(process := workers[0]) == (number,)
            own = StagePlan(
                number=number,
                process=process,
                layers=range(*stage.run),
                first_layer=self.costs.layers[stage.start].name,
                last_layer=self.costs.layers[stage.stop - 1].name,
                num_parameters=layout.sums.held(*stage.run).count,
                recompute=str(entries[number]),
                memory=self.memory[process] if is_alone else estimate_memory(layout, timeline, process, (number,)),
                busy_seconds=float(timeline.busy_seconds(number)) / table.num_steps,
            )
            stages.append(own)
        return tuple(stages)

    @cached_property
    def fullest(self) -> int:
        """The process that needs the most memory, as a share of its limit; the first of several equal ones."""
        return max(range(len(self.memory)), key=self._fullness_of)

    @property
    def fullness(self) -> float:
        """The largest share of a limit that a process or a machine needs. Where no limit is known, it is the peak
        bytes of the process with the highest peak."""
        return max(self._fullness_of(self.fullest), self.host_fullness)

    def _fullness_of(self, process: int) -> float:
        return self.memory[process].total / (self.planner.limit_of(process) or 1)

    @cached_property
    def slowest_stage(self) -> StagePlan:
        """The stage whose actions take the longest; the first of several equal ones."""
        return max(self.stages, key=lambda stage: stage.busy_seconds)

    @property
    def fits(self) -> bool:
        """Whether every process and every machine stays within its limit; True where none is known."""
        is_known = self.planner.memory_bytes is not None
        return self.host_fullness <= 1 and not (is_known and self._fullness_of(self.fullest) > 1)

    @property
    def sort_key(self) -> tuple[float, ...]:
        """The key by which plans are sorted, the best first: plans that fit, then the shorter step, or less memory."""
        if not self.fits:
            return (1.0, self.fullness)
        # A gain below the prediction's own error does not count: then fewer messages and less memory decide.
        return (0.0, float(f"{self.step_seconds:.3g}"), self.settings.num_micro_batches, self.peak_bytes)


def best_of(*plans: Plan) -> Plan:
    """The best of some plans; the first among equally good plans."""
    return min(plans, key=attrgetter("sort_key"))


class Planner(Processes):
    """Makes plans for one model, one mini-batch and one kind of device, of which each process may have another amount.

    Args:
        costs_of: rows of a micro-batch and the groups that it is cut into -> the costs of the model's layers for each
            member of a group. It is asked once for the same numbers.
        inputs: the shape of a mini-batch, the number of mini-batches in a step, and the optimizer. The micro-batches of
            a step run as one table.
        device, memory_bytes, cluster, speeds, division: the arguments of `Processes`.
        shares: rows of a micro-batch and K -> the share of each stage in a model beside the trained one; None: there is
            no such model.

    Attributes:
        possible: the modes that may be chosen for the model, its loss and its rows.
        made_by: the schedule in a configuration for which the planner makes its own table.
        groups: the groups that micro-batches are cut into, at most one member for each token.
        lighter: keys of a recipe that train adapters in place of all weights -> the planner with these keys.
        num_forwards: the number of times that all forwards run before each step.
        generation_costs: rows and their tokens -> the costs of the model's layers, where rows are generated.

    Raises:
        UserError: there is no mini-batch, or the optimizer's state has no known size.
    """

    possible: frozenset[str] = frozenset()
    made_by: str = AUTO
    lighter: Mapping[str, Callable[[], Plan]] = MappingProxyType({})
    num_forwards: int = 0
    generation_costs: Callable[[int, int], ModelCosts] | None = None

    def __init__(
        self,
        costs_of: Callable[[int, Groups], Sequence[ModelCosts]],
        inputs: PlanInputs,
        device: Device,
        memory_bytes: MemoryLimit = None,
        cluster: Cluster | None = None,
        speeds: Sequence[float] | None = None,
        division: Division = Division(),
        shares: Callable[[int, int], Sequence[Share]] | None = None,
    ) -> None:
        super().__init__(device, memory_bytes, cluster, speeds, division)
        self._costs_of, self._shares = costs_of, shares
        inputs.check()
        self.inputs = inputs
        self.rows = inputs.mini_batch().rows
        self.groups = Groups()
        self._sums: dict[tuple[int, Groups, int], tuple[StageCosts, Sequence[StageCosts]]] = {}
        self._of_libraries: dict[tuple[Placement, tuple[Link, ...]], Sequence[int]] = {}

    def with_rows(self, rows: int) -> Self:
        """Replace the number of rows of a mini-batch. The copy shares what was computed."""
        other = copy.copy(self)
        other.rows, other.inputs = rows, replace(self.inputs, example=replace(self.inputs.mini_batch(), rows=rows))
        return other

    def with_groups(self, groups: Groups) -> Self:
        """Replace the groups that micro-batches are cut into, of at most one member a token. The copy shares costs."""
        other = copy.copy(self)
        other.groups = groups.within(self.inputs.mini_batch().target_tokens)
        return other

    @property
    def known_costs(self) -> ModelCosts:
        """The costs of the layers for a micro-batch of some size, for values that do not depend on the size."""
        # One row is the cheapest, unless it may be too few for a BatchNorm.
        num_micro_batches = 1 if self.inputs.mini_batch().entries else self.rows
        known = next(iter(self._sums.values()), None) or self._all_sums(num_micro_batches)
        return known[0].costs

    @property
    def num_layers(self) -> int:
        """The number of layers of the model."""
        return len(self.known_costs.layers)

    def micro_batch_rows(self, num_micro_batches: int) -> int:
        """The number of rows of the largest of M micro-batches."""
        return largest_micro_batch(self.rows, num_micro_batches)

    def micro_batches_of_step(self, num_micro_batches: int) -> int:
        """The number of micro-batches of a step's table, for mini-batches cut into M. Each member of a group counts."""
        return self.inputs.accumulation * min(num_micro_batches, self.rows) * self.groups.size

    def costs(self, num_micro_batches: int) -> ModelCosts:
        """The costs of the layers for one of M micro-batches, or for the typical member of its group."""
        return self._all_sums(num_micro_batches)[0].costs

    def member_sums(self, num_micro_batches: int) -> Sequence[StageCosts]:
        """The sums of runs of layers for each member of the group of one of M micro-batches."""
        return self._all_sums(num_micro_batches)[1]

    def sums(self, settings: DecidedConfig) -> StageCosts:
        """The sums of runs of layers for a micro-batch of a configuration, or for the typical member of its group. The
        partition is not read."""
        return self._sums_of(settings)[0]

    def _sums_of(self, settings: DecidedConfig) -> tuple[StageCosts, Sequence[StageCosts]]:
        given = self.inputs.tables.get(settings.schedule)
        is_shared = settings.shares_last_layer if given is None else given.has_turns
        return self._all_sums(settings.num_micro_batches, settings.num_stages if is_shared else 0)

    def _all_sums(self, num_micro_batches: int, num_parts: int = 0) -> tuple[StageCosts, Sequence[StageCosts]]:
        """The sums of the typical member of a group, and the sums of each member; stages may share the last layer."""
        size = self.micro_batch_rows(num_micro_batches), self.groups
        key = *size, num_parts
        if key not in self._sums:
            # The other layers cost the same.
            known = self._all_sums(num_micro_batches)[1] if num_parts else None
            of_members = self._costs_of(*size) if known is None else [own.costs for own in known]
            each = [StageCosts(costs, self.device, self.link, num_parts) for costs in of_members]
            whole = each[0] if len(each) == 1 else StageCosts(typical(of_members), self.device, self.link, num_parts)
            self._sums[key] = whole, each
        return self._sums[key]

    def table(self, settings: DecidedConfig, sizes: Sequence[int] | None = None) -> Schedule:
        """The table that a pipeline with these settings runs; arguments and errors are those of `table_of`."""
        num_micro_batches = self.micro_batches_of_step(settings.num_micro_batches)
        table = table_of(settings, self.inputs, num_micro_batches, self.groups.size, sizes)
        self.check_processes(table.placement)
        return table

    def layout(self, settings: DecidedConfig, table: Schedule | None = None) -> Layout:
        """The layout of these settings with a table; None: the table that the settings run. Raises as `table`."""
        sums, of_members = self._sums_of(settings)
        rows, count = self.micro_batch_rows(settings.num_micro_batches), settings.num_stages
        blocks = Recompute.parse(settings.recompute, count).block_stages
        shares = [NOTHING] * count if self._shares is None else self._shares(rows, count)
        stages = [
            StageLayers(start, stop, "block" if stage in blocks else "none", shares[stage])
            for stage, start, stop in stages_of(settings.partition)
        ]
        if table is None:
            table = self.table(settings, [sums.owned(*stage.run).count for stage in stages])
        links = tuple(link for own in functions_of_modes("cost", "links") for link in own(table))
        key = table.placement, links
        if key not in self._of_libraries:
            self._of_libraries[key] = library_bytes(self, *key)
        return Layout(settings, self.inputs, self, sums, of_members, stages, table, self._of_libraries[key])

    def plan(self, settings: DecidedConfig) -> Plan:
        """Predict the memory and the time of one step of a pipeline with these settings.

        Raises:
            UserError: no pipeline could have these settings.
        """
        if settings.division != self.division:
            raise UserError(
                f"{settings.division.text} in the settings, and {self.division.text} for the planner, which has the "
                "costs of layers that are divided so; make another planner"
            )
        if self.groups != (other := self.with_groups(settings.groups)).groups:
            return other.plan(settings)
        costs = self.costs(settings.num_micro_batches)
        cut(len(costs.layers), settings.num_stages, settings.partition)
        layout = self.layout(settings)
        placement, timeline = layout.table.placement, simulate(layout.table, costs_of_table(layout))
        memory = tuple(
            estimate_memory(layout, timeline, number, placement.stages_run_by(number))
            for number in range(placement.num_processes)
        )
        return Plan(
            layout, self, costs, timeline, memory, before_table(layout, self.num_forwards, self.generation_costs)
        )


def _time_of(timeline: Timeline, process: int, again: Sequence[float]) -> TimeEstimate:
    """The seconds of a process in a step: the mean, where a table has several steps. `again` has the seconds in which a
    backward of each stage recomputes blocks."""
    parts = dict.fromkeys((kind.part for kind in KINDS.values()), 0.0)
    for span in timeline.by_process.get(process, ()):
        kind = span.action.kind
        # What does not occupy the device goes on beside the other actions.
        if kind.resource is Resource.COMPUTE:
            recomputed = min(again[span.action.stage], float(span.busy)) if kind.working is Held.BACKWARD else 0.0
            parts["recompute"] += recomputed
            parts[kind.part] += float(span.busy) - recomputed
    num_steps = timeline.schedule.num_steps
    parts = {name: seconds / num_steps for name, seconds in parts.items()}
    return TimeEstimate(**parts, bubble=max(float(timeline.total_seconds) / num_steps - sum(parts.values()), 0.0))
