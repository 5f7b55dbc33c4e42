"""Configurations laid out over processes: their table, the seconds of its actions and messages, and those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from hf_gpipe.errors import ScheduleError
from hf_gpipe.planner.costs.model_costs import ModelCosts, Seconds
from hf_gpipe.planner.costs.stage_costs import Share, StageCosts, StageLayers
from hf_gpipe.planner.machines.processes import Processes
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import PlanInputs, sent_share
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import LONGEST_WINDOW, Costs, Schedule, build, has_windows, recompute_under, simulate, with_modes
from hf_gpipe.schedule.kinds import RECOMPUTE
from hf_gpipe.schedule.updates import updates_beside, with_updates_last
from hf_gpipe.settings.pipeline import DecidedConfig

#: Bytes of a logit, which every process gets in float32.
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """A configuration with its stages and its table on the processes that it is planned for."""

    settings: DecidedConfig
    inputs: PlanInputs
    processes: Processes
    sums: StageCosts
    """The costs for one micro-batch, or for the typical member of its group."""
    of_members: Sequence[StageCosts]
    """The costs for each member of a group."""
    stages: Sequence[StageLayers]
    table: Schedule
    library_bytes: Sequence[int]
    """The bytes that libraries take of the GPU of each process."""

    @cached_property
    def recompute_shares(self) -> list[float]:
        """The share of the micro-batches whose forward the table repeats, for each stage."""
        table = self.table
        return [table.num_actions(stage, RECOMPUTE) / table.num_micro_batches for stage in range(table.num_stages)]

    @property
    def converts_once(self) -> bool:
        """Whether autocast converts weights once for a step: no weight changes between the table's micro-batches."""
        return not self.table.is_window

    @property
    def ids_bytes(self) -> int:
        """The bytes of the ids, masks and labels of a step."""
        return self.table.num_micro_batches * self.sums.costs.micro_batch_bytes

    @property
    def num_updating(self) -> int:
        """The number of devices that share the memory of a host, and so copy and update at once."""
        return self.processes.num_copying(self.table.placement.num_processes)

    def state_bytes(self, stage: int, size: Parameters) -> float:
        """The bytes of the optimizer's state that a process has of trainable weights of a stage."""
        inputs, dtype = self.inputs, self.sums.costs.dtype
        on_disk = 0.0 if self.processes.device.has_host else inputs.disk_bytes(size, dtype)
        shares = self.settings.shared_updates.among(self.table.placement.replicas[stage])
        return (inputs.state_bytes(size, dtype) - on_disk) / shares

    def disk_bytes(self, number: int) -> float:
        """The bytes of the optimizer's state of a stage, and of master weights, that are on a disk."""
        size = self.sums.owned(*self.stages[number].run)
        if self.processes.device.has_host and not self.inputs.offload_optimizer:
            hosted = (of_mode(self, number) for of_mode in functions_of_modes("cost", "hosted"))
            size = next((own for own in hosted if own is not None), Parameters())
        return self.inputs.disk_bytes(size, self.sums.costs.dtype)

    def old_versions(self, stage: int, process: int | None = None) -> int:
        """The old versions of its weights that a stage keeps beside the newest; without a process, the most of any."""
        return sum(own(self.table, stage, process) for own in functions_of_modes("cost", "old_versions"))

    def host_update_seconds(self, number: int) -> float | None:
        """The seconds in which the host updates a stage, while it does so for all devices; None: a device does."""
        owned = self.sums.owned(*self.stages[number].run)
        for of_mode in functions_of_modes("cost", "host_update_seconds"):
            if (seconds := of_mode(self, number, owned)) is not None:
                return float(seconds)
        if not self.inputs.offload_optimizer:
            return None
        # Gradients and weights travel.
        host, count = self.processes.device.host, self.num_updating
        moved = self.inputs.moved_bytes(owned, self.sums.costs.dtype)
        return 2 * owned.trainable_bytes / host.copy_rate(count) + moved / host.process_rate(count)


def table_of(
    settings: DecidedConfig,
    inputs: PlanInputs,
    num_micro_batches: int,
    group_size: int,
    sizes: Sequence[int] | None = None,
) -> Schedule:
    """The table of these settings, whose partition is not read. A window has about `LONGEST_WINDOW` micro-batches.

    Args:
        inputs: the planner's inputs, which have the tables that were read from files.
        num_micro_batches: the number of micro-batches of a step, where each member of a group counts.
        group_size: the number of members of each group.
        sizes: the size of each stage, by which shared stages are placed; None: stages are equal.

    Raises:
        ScheduleError: there is no such table, or the schedule is a table from a file with other numbers.
    """
    name, num_stages = settings.schedule, settings.num_stages
    if (given := inputs.tables.get(name)) is not None:
        asked = num_stages, inputs.accumulation * settings.num_micro_batches * group_size, settings.num_processes
        if asked != (given.num_stages, given.num_micro_batches, given.placement.num_processes):
            raise ScheduleError(f"the table {name} is of other numbers of stages, micro-batches or processes.")
        recompute_under(given, settings.recompute)
        return completed(given.first(num_micro_batches), settings, inputs)
    placement = settings.placed(name)
    if sizes is not None and settings.placement is None:
        placement = placement.balanced(sizes)
    recompute = Recompute.parse(settings.recompute, num_stages)
    count, steps = num_micro_batches, None
    if has_windows(name):
        steps = [num_micro_batches] * max(4, LONGEST_WINDOW // num_micro_batches)
        count = sum(steps)
    built = build(
        *(name, num_stages, count, placement, recompute.of_table),
        steps=steps,
        group_size=1 if steps else group_size,
        is_checked=False,
    )
    table = with_modes(built, recompute.entries)
    return table if steps else completed(table, settings, inputs)


def completed(table: Schedule, settings: DecidedConfig, inputs: PlanInputs) -> Schedule:
    """Put what modes add to every table of these settings into a table, and check it."""
    for complete in functions_of_modes("table", "complete"):
        table = complete(table, settings)
    for check in functions_of_modes("table", "check"):
        check(table, settings)
    return with_updates_of_run(table, inputs)


def with_updates_of_run(table: Schedule, inputs: PlanInputs) -> Schedule:
    """Put the updates of a table where a run has them: beside backwards where a mode can, if nothing needs the norm of
    the whole gradient."""
    needs_all = inputs.needs_norm or inputs.updates > 1
    return (None if needs_all else updates_beside(table)) or with_updates_last(table)


def costs_of_table(layout: Layout) -> Costs:
    """The costs for the simulation of a table."""
    sums, stages, placement = layout.sums, layout.stages, layout.table.placement
    network, speeds = layout.processes.network(placement), layout.processes.speeds_of(placement)

    others: dict[str, list[float]] = {}
    for seconds_of_mode in functions_of_modes("cost", "seconds"):
        others |= seconds_of_mode(layout)

    def update(number: int, stage: StageLayers, count: int) -> float:
        costs, owned, seconds = sums.costs, sums.owned(*stage.run), layout.host_update_seconds(number)
        if seconds is None and costs.update_seconds_per_parameter is not None:
            seconds = costs.update_seconds_per_parameter * owned.trainable_count
        if seconds is None:
            # Gradients are read for their norm and for the update; weights and state are read and written.
            moved = 4 * owned.trainable_bytes + 2 * layout.inputs.own_state_bytes(owned, costs.dtype)
            seconds = moved / layout.processes.device.memory_rate
        seconds /= speeds[number]
        if any(kind.changes_weights and kind in others and others[kind][number] for kind in layout.table.kinds):
            # Another action than U updates the stage.
            return seconds
        # All of what is on a disk is read and written.
        seconds += 2 * layout.disk_bytes(number) / layout.processes.device.host.disk_rate(layout.num_updating)
        if (shares := layout.settings.shared_updates.among(count)) == 1:
            return seconds
        # Each replica updates a part, and sends it to the others: half of what a reduction takes.
        return seconds / shares + network.reduce_seconds(number, owned.trainable_bytes) / 2

    def each(
        seconds_of: Callable[[Seconds, float, float, float], float],
        of_share: Callable[[Share], float] = lambda _: 0.0,
    ) -> list[float | Sequence[float]]:
        """The seconds of an action for each stage: a value for each member of a group in turn."""
        of_stages: list[float | Sequence[float]] = []
        for stage, speed, again in zip(stages, speeds, layout.recompute_shares, strict=True):
            values = []
            for own in layout.of_members:
                parts = again, own.weight_seconds(*stage.run), own.hidden_seconds(*stage.run)
                seconds = seconds_of(own.seconds(*stage.run, stage.inner), *parts)
                values.append((seconds + of_share(stage.share)) / speed)
            of_stages.append(values if len(values) > 1 else values[0])
        return of_stages

    per_byte = sent_share(layout.settings, sums.costs.dtype)
    layers = sums.costs.layers
    boundaries = [per_byte * (layers[stage.start].input_bytes + stage.share.input_bytes) for stage in stages[1:]]
    of_backward = attrgetter("backward_seconds")
    return Costs(
        forward_seconds=each(lambda own, again, *_: own.first_forward(again), attrgetter("forward_seconds")),
        recompute_seconds=each(lambda own, *_: own.forward),
        backward_seconds=each(lambda own, *_: own.backward, of_backward),
        # Products that W computes later hide nothing of I.
        input_seconds=each(lambda own, _, weights, hidden: own.backward - weights + hidden, of_backward),
        weight_seconds=each(lambda _, __, weights, ___: weights),
        update_seconds=[*map(update, range(len(stages)), stages, placement.replicas)],
        transfer_seconds=network.transfer_seconds(boundaries),
        reduce_seconds=[
            network.reduce_seconds(number, sums.held(*stage.run).trainable_bytes) for number, stage in enumerate(stages)
        ],
        turn_transfer_seconds=sum(own(layout) for own in functions_of_modes("cost", "turn_transfer_seconds")),
        others=others,
    )


class Before(NamedTuple):
    """The seconds before the table of a step."""

    forwards: float = 0.0
    """Of forwards of all rows, such as a reference model's."""
    generation: float = 0.0
    """In which tokens are generated one after another."""


def before_table(
    layout: Layout, num_forwards: int, generation_costs: Callable[[int, int], ModelCosts] | None
) -> Before:
    """Compute the seconds of what runs before the table of a step.

    Args:
        num_forwards: how often all forwards run.
        generation_costs: rows and their tokens -> the costs of the model's layers; None: nothing is generated.
    """
    forwards, table, inputs = 0.0, layout.table, layout.inputs
    if num_forwards:
        number = table.num_micro_batches // table.num_steps
        only = build("forward_only", table.num_stages, number, table.placement, is_checked=False)
        only = completed(only, layout.settings, inputs)
        forwards = num_forwards * float(simulate(only, costs_of_table(replace(layout, table=only))).total_seconds)
    if generation_costs is None:
        return Before(forwards)
    # What each token reads of the keys and values before it is left out, as is the search among the logits.
    first = _token_seconds(layout, generation_costs, max(inputs.mini_batch().target_tokens - inputs.new_tokens, 1))
    others = max(inputs.new_tokens - 1, 0) * _token_seconds(layout, generation_costs, 1)
    return Before(forwards, inputs.accumulation * (first + others))


def _token_seconds(layout: Layout, generation_costs: Callable[[int, int], ModelCosts], tokens: int) -> float:
    """The seconds in which a pipeline generates a token from so many, where the stages run one after another."""
    placement, processes, inputs = layout.table.placement, layout.processes, layout.inputs
    # The costs of one replica of the pipeline.
    rows = -(-inputs.mini_batch().rows // min(placement.replicas))
    sums = StageCosts(generation_costs(rows, tokens), processes.device)
    own = sum(
        sums.seconds(*stage.run, "none").forward_only / speed
        for stage, speed in zip(layout.stages, processes.speeds_of(placement), strict=True)
    )
    sent = [float(sums.costs.layers[stage.start].input_bytes) for stage in layout.stages[1:]]
    network, slowest = processes.network(placement), dict[int, float]()
    for (boundary, *_), seconds in network.transfer_seconds(sent).items():
        slowest[boundary] = max(slowest.get(boundary, 0.0), seconds)
    # The logits of a token travel back to every process.
    back = network.transfer_seconds([float(_LOGIT_BYTES * rows * inputs.vocabulary)] * len(sent))
    return own + sum(slowest.values()) + max(back.values(), default=0.0)
