"""A plan: one way to run a model as a pipeline, with what every stage holds and needs, and how long a step takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hf_gpipe.errors import ScheduleError
from hf_gpipe.partition import partition as cut
from hf_gpipe.partition import stages_of
from hf_gpipe.planner.costs import InnerRecompute, ModelCosts
from hf_gpipe.planner.devices import Device
from hf_gpipe.planner.memory import MemoryBill, Ran, StageLayers, bill, ran
from hf_gpipe.planner.settings import PlanInputs
from hf_gpipe.planner.sums import MemorySums
from hf_gpipe.planner.timing import TimeBill, TimeSums
from hf_gpipe.planner.workload import largest_micro_batch
from hf_gpipe.recipe import DecidedConfig as Settings
from hf_gpipe.recipe import RecomputeChoice
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import ActionKind, Schedule, Timeline, build, placement_for, recompute_under, simulate


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        number: of the stage.
        process: that holds it.
        layers: numbers of its layers.
        first_layer, last_layer: names of the two ends.
        num_parameters: that it holds, ties of other stages included.
        recompute: what it recomputes: "none", "block", "stage", or its most live graphs.
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
    memory: MemoryBill
    busy_seconds: float


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a plan: its stages, what it holds at the fullest moment, and how it spends a step."""

    number: int
    stages: tuple[int, ...]
    memory: MemoryBill
    time: TimeBill


@dataclass(frozen=True)
class Plan:
    """What `Planner.plan` predicts of one step."""

    settings: Settings
    planner: Planner
    costs: ModelCosts
    stages: tuple[StagePlan, ...]
    processes: tuple[ProcessPlan, ...]
    timeline: Timeline

    @property
    def step_seconds(self) -> float:
        """From the first action to the last update."""
        return float(self.timeline.total_seconds)

    @property
    def bubble(self) -> float:
        """The idle fraction of all processes."""
        return float(self.timeline.bubble)

    @property
    def peak_bytes(self) -> int:
        """Of the fullest process."""
        return self.fullest_process.memory.total

    @cached_property
    def fullest_process(self) -> ProcessPlan:
        """The process that needs the most memory; of equal ones the first."""
        return max(self.processes, key=lambda process: process.memory.total)

    @cached_property
    def slowest_stage(self) -> StagePlan:
        """The stage whose actions take the longest; of equal ones the first."""
        return max(self.stages, key=lambda stage: stage.busy_seconds)

    @property
    def fits(self) -> bool:
        """Whether every process stays within the limit; True where none is known."""
        limit = self.planner.memory_bytes
        return limit is None or self.peak_bytes <= limit


class Planner:
    """Makes plans for one model, one mini-batch and one kind of device.

    Args:
        costs_of: rows of a micro-batch -> the costs of the model's layers. It is asked once for each number of rows.
        inputs: the shape of a mini-batch, how many are accumulated in a step, and the optimizer. The micro-batches of a
            step run as one table.
        device: what a process computes on.
        memory_bytes: the most that a process may use; None: the device's memory, where that is known.

    Raises:
        UserError: there is no mini-batch, or the optimizer's state has no known size.
    """

    def __init__(
        self,
        costs_of: Callable[[int], ModelCosts],
        inputs: PlanInputs,
        device: Device,
        memory_bytes: int | None = None,
    ) -> None:
        self._costs_of = costs_of
        inputs.check()
        self.inputs = inputs
        self.rows = inputs.mini_batch().rows
        self.device = device
        self.memory_bytes = device.memory_bytes if memory_bytes is None else memory_bytes
        self._costs: dict[int, ModelCosts] = {}
        self._time_sums: dict[int, TimeSums] = {}
        self._memory_sums: dict[tuple[int, float], MemorySums] = {}

    def within(self, memory_bytes: int | None) -> Planner:
        """The same planner with another limit; what it has computed is shared."""
        other = copy.copy(self)
        other.memory_bytes = memory_bytes
        return other

    @property
    def num_layers(self) -> int:
        """Layers of the model, the same for every micro-batch."""
        costs = next(iter(self._costs.values()), None) or self.costs(self.rows)
        return len(costs.layers)

    def micro_batch_rows(self, num_micro_batches: int) -> int:
        """Rows of the largest of M micro-batches."""
        return largest_micro_batch(self.rows, num_micro_batches)

    def micro_batches_of_step(self, num_micro_batches: int) -> int:
        """Of the table, where a mini-batch is cut into M."""
        return self.inputs.accumulation * min(num_micro_batches, self.rows)

    def costs(self, num_micro_batches: int) -> ModelCosts:
        """Of one of M micro-batches."""
        rows = self.micro_batch_rows(num_micro_batches)
        if rows not in self._costs:
            self._costs[rows] = self._costs_of(rows)
        return self._costs[rows]

    def time_sums(self, num_micro_batches: int) -> TimeSums:
        """Seconds of runs of layers for one of M micro-batches."""
        rows = self.micro_batch_rows(num_micro_batches)
        if rows not in self._time_sums:
            self._time_sums[rows] = TimeSums(self.costs(num_micro_batches), self.device)
        return self._time_sums[rows]

    def memory_sums(self, settings: Settings) -> MemorySums:
        """Bytes of runs of layers for one micro-batch of these settings."""
        costs = self.costs(settings.num_micro_batches)
        share = self.inputs.state_share(costs.dtype)
        key = self.micro_batch_rows(settings.num_micro_batches), share
        if key not in self._memory_sums:
            self._memory_sums[key] = MemorySums(costs, share)
        return self._memory_sums[key]

    def table(
        self, schedule: str, num_stages: int, num_micro_batches: int, recompute: RecomputeChoice, num_processes: int
    ) -> Schedule:
        """The table that a pipeline with these arguments runs.

        Raises:
            ScheduleError: there is none, or the schedule is a table that was read and does not have these numbers.
        """
        if (given := self.inputs.tables.get(schedule)) is not None:
            asked = num_stages, self.inputs.accumulation * num_micro_batches, num_processes
            if asked != (given.num_stages, given.num_micro_batches, given.placement.num_processes):
                raise ScheduleError(f"the table {schedule} is of other numbers of stages, micro-batches or processes.")
            recompute_under(given, recompute)
            return given.of_first(self.micro_batches_of_step(num_micro_batches))
        placement = placement_for(schedule, num_stages, num_processes)
        of_table = Recompute.parse(recompute, num_stages).of_table
        return build(schedule, num_stages, self.micro_batches_of_step(num_micro_batches), placement, of_table)

    def plan(self, settings: Settings) -> Plan:
        """What one step of a pipeline with these settings needs.

        Raises:
            UserError: one of its kinds, for settings that no pipeline could have.
        """
        num_stages, num_micro_batches = settings.num_stages, settings.num_micro_batches
        costs, sums = self.costs(num_micro_batches), self.time_sums(num_micro_batches)
        cut(len(costs.layers), num_stages, settings.partition)
        table = self.table(settings.schedule, num_stages, num_micro_batches, settings.recompute, settings.num_processes)
        stages = stage_layers(settings)
        timeline = simulate(
            table,
            sums.table_costs(
                stages, recompute_shares(table), self.inputs.optim, is_local=table.placement.num_processes == 1
            ),
        )
        spans, state_share, reserved = ran(timeline), self.inputs.state_share(costs.dtype), self.device.reserved_share
        processes = []
        for number in range(table.placement.num_processes):
            own = table.placement.stages_of(number)
            memory = bill(costs, stages, spans, own, state_share, reserved)
            processes.append(ProcessPlan(number, own, memory, _time_bill(timeline, spans, own)))
        plans = []
        for number, (stage, entry) in enumerate(zip(stages, _entries(settings), strict=True)):
            process = processes[table.placement.processes[number]]
            is_alone = len(process.stages) == 1
            plans.append(
                StagePlan(
                    number=number,
                    process=process.number,
                    layers=range(stage.start, stage.stop),
                    first_layer=costs.layers[stage.start].name,
                    last_layer=costs.layers[stage.stop - 1].name,
                    num_parameters=costs.held(stage.start, stage.stop).count,
                    owned_parameters=costs.owned(stage.start, stage.stop).count,
                    recompute=str(entry),
                    memory=process.memory if is_alone else bill(costs, stages, spans, (number,), state_share, reserved),
                    busy_seconds=sum(float(span.busy) for span in spans[number].values()),
                )
            )
        return Plan(settings, self, costs, tuple(plans), tuple(processes), timeline)


def inner_recompute(settings: Settings) -> list[InnerRecompute]:
    """What the live graphs of each stage keep."""
    blocks = Recompute.parse(settings.recompute, settings.num_stages).block_stages
    return ["block" if stage in blocks else "none" for stage in range(settings.num_stages)]


def stage_layers(settings: Settings) -> list[StageLayers]:
    """The layers of each stage, and what its graphs keep."""
    inner = inner_recompute(settings)
    return [StageLayers(start, stop, inner[stage]) for stage, start, stop in stages_of(settings.partition)]


def recompute_shares(table: Schedule) -> list[float]:
    """For each stage the share of the micro-batches whose forward a table repeats."""
    return [table.num_recomputations(stage) / table.num_micro_batches for stage in range(table.num_stages)]


def _entries(settings: Settings) -> tuple[str | int, ...]:
    """What each stage recomputes."""
    if isinstance(settings.recompute, str):
        return (settings.recompute,) * settings.num_stages
    return settings.recompute


def _time_bill(timeline: Timeline, spans: Ran, own: Sequence[int]) -> TimeBill:
    seconds = dict.fromkeys(ActionKind, 0.0)
    for stage in own:
        for action, span in spans[stage].items():
            seconds[action.kind] += float(span.busy)
    return TimeBill(
        forward=seconds[ActionKind.FORWARD],
        recompute=seconds[ActionKind.RECOMPUTE],
        backward=seconds[ActionKind.BACKWARD],
        update=seconds[ActionKind.UPDATE],
        bubble=max(float(timeline.total_seconds) - sum(seconds.values()), 0.0),
    )
