"""A plan: one way to run a model as a pipeline, with what every stage holds and needs, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType

from hf_gpipe.errors import UserError
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.before import Before, before_table
from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.layout import Layout, Layouts
from hf_gpipe.planner.memory import MemoryEstimate, estimate_memory, hosted_bytes
from hf_gpipe.planner.table_costs import costs_of_table
from hf_gpipe.planner.times import TimeEstimate, time_of
from hf_gpipe.recipe import DecidedConfig
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import Timeline, simulate
from hf_gpipe.text import seconds_text, size_text


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        number: of the stage.
        process: that holds it.
        layers: numbers of its layers.
        first_layer, last_layer: names of the two ends.
        num_parameters: that it holds, ties of other stages included.
        recompute: what it recomputes: "none", "block", "stage", or its most stored graphs; or "host".
        memory: what it would hold as its process's only stage.
        busy_seconds: how long its actions take in a step.
        owned_parameters: num_parameters without copies of other stages' ties.
    """

    number: int
    process: int
    layers: range
    first_layer: str
    last_layer: str
    num_parameters: int
    owned_parameters: int
    recompute: str
    memory: MemoryEstimate
    busy_seconds: float


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a plan: its stages, what it holds at the peak, and how it spends a step."""

    number: int
    stages: tuple[int, ...]
    memory: MemoryEstimate
    time: TimeEstimate


@dataclass(frozen=True)
class Plan:
    """The prediction of one step by `Planner.plan`.

    Attributes:
        layout: the configuration with its stages and its table.
        planner: that made it, and knows the limits.
        costs: of the layers for a micro-batch.
        before: the seconds of what runs before the table.
    """

    layout: Layout
    planner: Planner
    costs: ModelCosts
    stages: tuple[StagePlan, ...]
    processes: tuple[ProcessPlan, ...]
    timeline: Timeline
    before: Before

    def __repr__(self) -> str:
        is_known = self.planner.memory_bytes is not None
        fits = "it does not fit" if not self.fits else "it fits" if is_known else "no limit is known"
        return (
            f"Plan({self.settings.num_stages} stages, {self.settings.num_micro_batches} micro-batches, "
            f"{self.settings.schedule}: {seconds_text(self.step_seconds)} per step, bubble {self.bubble:.1%}, "
            f"{size_text(self.peak_bytes)} in process {self.fullest_process.number}, {fits})"
        )

    @property
    def settings(self) -> DecidedConfig:
        """The configuration."""
        return self.layout.settings

    @property
    def step_seconds(self) -> float:
        """From the first action to the last update; under an asynchronous schedule the mean of a window's steps.

        A step with several updates from the same rollouts runs its table for each.
        """
        return sum(self.before) + self.planner.inputs.updates * self.table_seconds

    @property
    def table_seconds(self) -> float:
        """Of the table alone, which has one update."""
        return float(self.timeline.total_seconds) / self.timeline.schedule.num_steps

    @property
    def bubble(self) -> float:
        """The idle fraction of all processes."""
        return float(self.timeline.bubble)

    @property
    def peak_bytes(self) -> int:
        """The memory estimate of the process with the highest peak."""
        return self.fullest_process.memory.total

    @cached_property
    def hosted_bytes(self) -> list[int]:
        """For each process the bytes in the memory of its host of weights that visit, and of graphs that wait there."""
        return hosted_bytes(self.layout, self.timeline)

    @property
    def machine_bytes(self) -> int:
        """Those of all processes of a machine, the most of any machine."""
        size = self.planner.host_size(len(self.processes))
        hosted = [sum(self.hosted_bytes[start : start + size]) for start in range(0, len(self.processes), size)]
        return self.planner.division.total(max(hosted))

    @property
    def host_fullness(self) -> float:
        """The share of a machine's memory that these bytes need, the largest of all; 0 where that is not known."""
        limit = self.planner.device.host.memory_bytes
        return 0.0 if limit is None else self.machine_bytes / max(limit, 1)

    @cached_property
    def fullest_process(self) -> ProcessPlan:
        """The process that needs the most memory, as a share of its limit; the first of several equal ones."""
        return max(self.processes, key=self._fullness_of)

    @property
    def fullness(self) -> float:
        """The share of its limit that the process with the highest peak needs, or a machine if that is more; the bytes
        of the process where no limit is known."""
        return max(self._fullness_of(self.fullest_process), self.host_fullness)

    def _fullness_of(self, process: ProcessPlan) -> float:
        return process.memory.total / (self.planner.limit_of(process.number) or 1)

    @cached_property
    def slowest_stage(self) -> StagePlan:
        """The stage whose actions take the longest; the first of several equal ones."""
        return max(self.stages, key=lambda stage: stage.busy_seconds)

    @property
    def fits(self) -> bool:
        """Whether every process and every machine stays within its limit; True where none is known."""
        is_known = self.planner.memory_bytes is not None
        return self.host_fullness <= 1 and not (is_known and self._fullness_of(self.fullest_process) > 1)

    @property
    def sort_key(self) -> tuple[float, ...]:
        """The better of two plans has the smaller one: what fits, then the shorter step, or the lesser memory."""
        if not self.fits:
            return (1.0, self.fullness)
        # A gain below the model's own error is none: then the fewer messages and the less memory.
        return (0.0, float(f"{self.step_seconds:.3g}"), self.settings.num_micro_batches, self.peak_bytes)


def best_of(*plans: Plan) -> Plan:
    """The best of some plans; of equally good ones the first."""
    return min(plans, key=attrgetter("sort_key"))


class Planner(Layouts):
    """Makes plans for one model, one mini-batch and one kind of device; arguments and errors are those of `Layouts`.

    Attributes:
        lighter: by keys of a recipe that have adapters trained in place of all weights, what plans that.
        num_forwards: how often all forwards run before each step.
        of_tokens: rows and their tokens -> the costs of the model's layers, where rows are generated.
    """

    lighter: Mapping[str, Callable[[], Plan]] = MappingProxyType({})
    num_forwards: int = 0
    of_tokens: Callable[[int, int], ModelCosts] | None = None

    def plan(self, settings: DecidedConfig) -> Plan:
        """Predict the memory and the time of one step of a pipeline with these settings.

        Raises:
            UserError: one of its kinds, for settings that no pipeline could have.
        """
        if settings.division != self.division:
            raise UserError(
                f"{settings.division.text} in the settings, and {self.division.text} for the planner, which has the "
                "costs of layers that are divided so; make another planner"
            )
        if self.chunks != (other := self.with_chunks(settings.chunks)).chunks:
            return other.plan(settings)
        costs = self.costs(settings.num_micro_batches)
        cut(len(costs.layers), settings.num_stages, settings.partition)
        layout = self.layout(settings)
        sums, placement = layout.sums, layout.table.placement
        timeline = simulate(layout.table, costs_of_table(layout))
        processes = []
        for number in range(placement.num_processes):
            memory = estimate_memory(layout, timeline, number, placement.stages_run_by(number))
            processes.append(ProcessPlan(number, placement.stages_of(number), memory, time_of(timeline, number)))
        plans = []
        entries = Recompute.parse(settings.recompute, settings.num_stages).entries
        for number, (stage, entry) in enumerate(zip(layout.stages, entries, strict=True)):
            # Of several replicas the first, which has most micro-batches.
            process = processes[placement.workers[number][0]]
            is_alone = len(process.stages) == 1
            alone = process.memory if is_alone else estimate_memory(layout, timeline, process.number, (number,))
            plans.append(
                StagePlan(
                    number=number,
                    process=process.number,
                    layers=range(*stage.run),
                    first_layer=costs.layers[stage.start].name,
                    last_layer=costs.layers[stage.stop - 1].name,
                    num_parameters=sums.held(*stage.run).count,
                    owned_parameters=sums.owned(*stage.run).count,
                    recompute=str(entry),
                    memory=alone,
                    busy_seconds=float(timeline.busy_seconds(number)) / layout.table.num_steps,
                )
            )
        before = before_table(layout, self.num_forwards, self.of_tokens)
        return Plan(layout, self, costs, tuple(plans), tuple(processes), timeline, before)
