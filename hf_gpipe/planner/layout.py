"""Configurations laid out over processes: what the memory, the time and the messages of a plan are computed from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from hf_gpipe.partition import stages_of
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.planner.costs.beside import NOTHING, Beside, besides
from hf_gpipe.planner.costs.chunks import taper_of, typical
from hf_gpipe.planner.costs.model_costs import InnerRecompute, ModelCosts
from hf_gpipe.planner.costs.prefix_sums import LayerSums
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.machines.libraries import library_bytes
from hf_gpipe.planner.machines.processes import MemoryLimit, Processes
from hf_gpipe.planner.tables import table_of
from hf_gpipe.planner.workload import PlanInputs, largest_micro_batch
from hf_gpipe.recipe import Chunks, DecidedConfig, Division
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import Placement, Schedule


class StageLayers(NamedTuple):
    """A stage of a plan: the run of layers `start` to `stop` (exclusive)."""

    start: int
    stop: int
    inner: InnerRecompute
    """Which tensors its stored graphs keep."""
    beside: Beside = NOTHING
    """A teacher's stage."""

    @property
    def run(self) -> tuple[int, int]:
        """The first layer, and the one after the last."""
        return self.start, self.stop


@dataclass(frozen=True)
class Layout:
    """A configuration with its stages and its table on the processes that it is planned for.

    Attributes:
        settings: the configuration.
        inputs: the mini-batch and the optimizer.
        processes: their device, links and speeds.
        sums: of the model's layers, for one micro-batch, or for the typical one of its chunks.
        of_chunks: the same for each chunk.
        stages: all of them, in order.
        table: what is run.
        library_bytes: that libraries take of the GPU of each process.
    """

    settings: DecidedConfig
    inputs: PlanInputs
    processes: Processes
    sums: LayerSums
    of_chunks: Sequence[LayerSums]
    stages: Sequence[StageLayers]
    table: Schedule
    library_bytes: Sequence[int]

    @cached_property
    def recompute_shares(self) -> list[float]:
        """For each stage the share of the micro-batches whose forward the table repeats."""
        table = self.table
        return [table.num_recomputations(stage) / table.num_micro_batches for stage in range(table.num_stages)]

    @cached_property
    def state_shares(self) -> list[float]:
        """For each stage the bytes of the optimizer's state of a process per byte of the stage's trainable weights."""
        share = self.inputs.state_share(self.sums.costs.dtype)
        return [share / self.settings.update_shares(count) for count in self.table.placement.replicas]


class Layouts(Processes):
    """The layouts of one model, one mini-batch and one kind of device, of which each process may have another amount.

    Args:
        costs_of: rows of a micro-batch and how they are cut -> for each chunk the costs of the model's layers;
            of rows that are not cut it is one. It is asked once for the same numbers.
        inputs: the shape of a mini-batch, how many are accumulated in a step, and the optimizer. The micro-batches of a
            step run as one table.
        device, memory_bytes, cluster, speeds, division: as of `Processes`.
        teacher: rows of a micro-batch -> the costs of a teacher's layers; None: there is no teacher.

    Attributes:
        can_visit: whether weights may visit devices.
        can_deal: whether stages may be dealt to the processes of a machine.
        chunks: how rows are cut into chunks of tokens, at most one a token.

    Raises:
        UserError: there is no mini-batch, or the optimizer's state has no known size.
    """

    def __init__(
        self,
        costs_of: Callable[[int, Chunks], Sequence[ModelCosts]],
        inputs: PlanInputs,
        device: Device,
        memory_bytes: MemoryLimit = None,
        cluster: Cluster | None = None,
        speeds: Sequence[float] | None = None,
        division: Division = Division(),
        teacher: Callable[[int], ModelCosts] | None = None,
    ) -> None:
        super().__init__(device, memory_bytes, cluster, speeds, division)
        self._costs_of, self._teacher = costs_of, teacher
        inputs.check()
        self.inputs = inputs
        self.rows = inputs.mini_batch().rows
        self.can_visit = self.can_deal = teacher is None
        self.chunks = Chunks()
        self._sums: dict[tuple[int, Chunks, int], tuple[LayerSums, Sequence[LayerSums]]] = {}
        self._of_teacher: dict[int, LayerSums] = {}
        self._of_libraries: dict[tuple[Placement, bool], Sequence[int]] = {}

    def with_rows(self, rows: int) -> Self:
        """The same for a mini-batch of another number of rows; what it has computed is shared."""
        other = copy.copy(self)
        other.rows, other.inputs = rows, replace(self.inputs, example=replace(self.inputs.mini_batch(), rows=rows))
        return other

    def with_chunks(self, chunks: Chunks) -> Self:
        """The same for rows that are cut into so many chunks, at most one a token; costs are shared."""
        other = copy.copy(self)
        other.chunks = chunks.within(self.inputs.mini_batch().target_tokens)
        return other

    def tapered(self, chunks: Chunks, *, is_open: bool) -> list[Chunks]:
        """Such chunks with their own taper, and if that is open also with the one by which they take as long."""
        if not is_open or chunks.most == 1:
            return [chunks]
        # Of the longest rows, whatever M is.
        alike = taper_of(self.with_chunks(chunks._replace(taper=0.0))._all_sums(self.rows)[1])
        return [chunks._replace(taper=taper) for taper in sorted({chunks.taper, alike})]

    @property
    def known_costs(self) -> ModelCosts:
        """Costs of the layers for a micro-batch of any size, for what is the same for every one."""
        # One row is the cheapest, unless it may be too few for a BatchNorm.
        num_micro_batches = 1 if self.inputs.mini_batch().entries else self.rows
        known = next(iter(self._sums.values()), None) or self._all_sums(num_micro_batches)
        return known[0].costs

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.known_costs.layers)

    def micro_batch_rows(self, num_micro_batches: int) -> int:
        """Rows of the largest of M micro-batches."""
        return largest_micro_batch(self.rows, num_micro_batches)

    def micro_batches_of_step(self, num_micro_batches: int) -> int:
        """Micro-batches in the table of a step, where a mini-batch is cut into M; each chunk of a row counts."""
        return self.inputs.accumulation * min(num_micro_batches, self.rows) * self.chunks.most

    def costs(self, num_micro_batches: int) -> ModelCosts:
        """The costs of the layers for one of M micro-batches, or for the typical one of its chunks."""
        return self._all_sums(num_micro_batches)[0].costs

    def sums(self, settings: DecidedConfig) -> LayerSums:
        """Bytes and seconds of runs of layers for a micro-batch of a configuration, or for the typical one of its
        chunks. Its partition is not read."""
        return self._sums_of(settings)[0]

    def _sums_of(self, settings: DecidedConfig) -> tuple[LayerSums, Sequence[LayerSums]]:
        given = self.inputs.tables.get(settings.schedule)
        divides_head = settings.divides_head if given is None else given.divides_head
        return self._all_sums(settings.num_micro_batches, settings.num_stages if divides_head else 0)

    def _all_sums(self, num_micro_batches: int, num_parts: int = 0) -> tuple[LayerSums, Sequence[LayerSums]]:
        """Those of the typical chunk, and those of each chunk; the head may be divided into parts."""
        size = self.micro_batch_rows(num_micro_batches), self.chunks
        key = *size, num_parts
        if key not in self._sums:
            of_chunks = self._costs_of(*size)
            each = [LayerSums(costs, self.device, self.link, num_parts) for costs in of_chunks]
            whole = each[0] if len(each) == 1 else LayerSums(typical(of_chunks), self.device, self.link, num_parts)
            self._sums[key] = whole, each
        return self._sums[key]

    def _stage_layers(self, settings: DecidedConfig) -> list[StageLayers]:
        inner, rows = inner_recompute(settings), self.micro_batch_rows(settings.num_micro_batches)
        if self._teacher is not None and rows not in self._of_teacher:
            self._of_teacher[rows] = LayerSums(self._teacher(rows), self.device)
        beside = besides(self._of_teacher.get(rows), settings.num_stages)
        return [
            StageLayers(start, stop, inner[stage], beside[stage])
            for stage, start, stop in stages_of(settings.partition)
        ]

    def _library_bytes(self, table: Schedule) -> Sequence[int]:
        placement, divides_head = key = table.placement, table.divides_head
        if key not in self._of_libraries:
            self._of_libraries[key] = library_bytes(self, placement, divides_head=divides_head)
        return self._of_libraries[key]

    def table(self, settings: DecidedConfig, sizes: Sequence[int] | None = None) -> Schedule:
        """The table that a pipeline with these settings runs; arguments and errors are those of `tables.table_of`."""
        num_micro_batches = self.micro_batches_of_step(settings.num_micro_batches)
        table = table_of(settings, self.inputs, num_micro_batches, self.chunks.most, sizes)
        self.check_processes(table.placement)
        return table

    def layout(self, settings: DecidedConfig, table: Schedule | None = None) -> Layout:
        """The layout of these settings with a table; None: with the one that they run. Raises as `table`."""
        sums, of_chunks = self._sums_of(settings)
        stages = self._stage_layers(settings)
        if table is None:
            table = self.table(settings, [sums.owned(*stage.run).count for stage in stages])
        return Layout(settings, self.inputs, self, sums, of_chunks, stages, table, self._library_bytes(table))


def inner_recompute(settings: DecidedConfig) -> list[InnerRecompute]:
    """Which tensors the stored graphs of each stage keep."""
    blocks = Recompute.parse(settings.recompute, settings.num_stages).block_stages
    return ["block" if stage in blocks else "none" for stage in range(settings.num_stages)]
