"""The request for a pipeline, and the decision about it. Both are the same in all processes, and need no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError
from hf_gpipe.job.agreement import compare
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers import commit_of
from hf_gpipe.losses.custom import loss_of
from hf_gpipe.losses.loss import NOT_PACKED, PLAIN, Loss
from hf_gpipe.model.companion import Companion, OpenCompanion, check_companion
from hf_gpipe.model.opening import chain_of, open_chain
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline.variant import Probe, Variant
from hf_gpipe.planner.decide import Planning, compare_with_machines
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import OF_THE_READER, PlanInputs, Workload
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.cutting import Cutting, cutters_of
from hf_gpipe.runtime.mesh import Mesh, table_of_reader
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.schedule import groups, with_modes
from hf_gpipe.schedule.builders import build
from hf_gpipe.schedule.file import TABLE_SUFFIX, is_table_file, recompute_under
from hf_gpipe.schedule.named import has_windows
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.updates import updates_beside, with_updates_last
from hf_gpipe.settings.mode import COMPARED_ROWS
from hf_gpipe.settings.pipeline import OF_EACH_PROCESS, DecidedConfig, PipelineConfig


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline as it is asked for. `Pipeline` says what its arguments mean.

    Attributes:
        config: how it is cut and run.
        inputs: of the planner; its `packing` says whether training packs rows.
        seed: None: the default of recipes.
        loss: of training; of a model that classifies rows in another way, the plain one is replaced.
        by_length: whether training sorts rows by length.
        companion: a model beside the trained one; None: there is none.
    """

    model: ModelSpec
    config: PipelineConfig
    inputs: PlanInputs = field(default_factory=PlanInputs)
    seed: int | None = None
    loss: Loss = PLAIN
    by_length: bool = False
    companion: Companion | None = None

    def cutting(self, config: DecidedConfig) -> Cutting:
        """How mini-batches are cut, by the decided configuration."""
        is_compiled, further = config.compiled.torch_compile, cutters_of(config)
        return Cutting(config.num_micro_batches, self.by_length, self.inputs.packing, is_compiled, further)

    def compare(self) -> None:
        """Compare it with that of the other processes. Every process calls it. Raises DisagreementError."""
        compare(self._compared, "arguments of the Pipeline")

    def _compared(self) -> dict[str, Any]:
        same = {name: value for name, value in self.config.values().items() if name not in OF_EACH_PROCESS}
        if is_table_file(self.config.schedule):
            same["schedule"] = TABLE_SUFFIX  # the main process reads it, and the others may know another path
        same |= {name: value for name, value in vars(self.inputs).items() if name not in OF_THE_READER}
        same |= {name: value for name, value in vars(self.loss.token_loss).items() if name != "metrics"}
        same |= {"seed": self.seed, "loss": self.loss, "length_bucketing": self.by_length}
        return same | ({} if self.companion is None else self.companion.compared()) | self.model.compared()


@dataclass(frozen=True)
class Decision:
    """A model, cut into stages that have their places, and the tables to run.

    Attributes:
        given, config, planned, loss, links: as of `Pipeline`.
        world: where the stages are.
        table: of the schedule, where it is the file of one, or was made for the plan.
        planning: the planner's inputs.
        probe: says whether the model can be run as it is asked for.
        companion: the model beside the trained one; None: there is none.
    """

    given: PipelineConfig
    config: DecidedConfig
    planned: str | None
    adapter: Adapter
    loss: Loss
    partition: Sequence[range]
    world: Mesh
    links: Sequence[str]
    table: Schedule | None
    planning: Planning
    probe: Probe
    companion: OpenCompanion | None = None

    @classmethod
    def of(cls, request: PipelineRequest, world: World, probe: Probe) -> Decision:
        """Every process calls it, with the same request. Raises UserError where the request cannot be met."""
        inputs, shapes = request.inputs, tuple[Any, ...]()
        given = request.config.with_defaults(can_plan=world.from_main(lambda: inputs.example is not None))
        # Read before the model: a table that cannot be run costs no time.
        table, num_workers = None, given.division.workers_among(world.num_processes)
        if is_table_file(given.schedule):
            table = table_of_reader(world, lambda: given.table(inputs.accumulation, num_workers))
        check_companion(request.companion, request.model, request.loss)
        chain = chain_of(request.model)
        if chain is not None:
            # Every process finds the layers by it.
            example = world.from_main(inputs.entries_workload, Workload)
            inputs, shapes = replace(inputs, example=example), () if example is None else example.shapes
        if table is not None:
            given = given.replace(recompute=recompute_under(table, given.recompute))
            inputs = replace(inputs, tables={given.schedule: table})

        # The model without its weights.
        adapter: Adapter
        if chain is None:
            adapter = probe.open(request.model, world.device)
        else:
            adapter = open_chain(request.model, chain, shapes, world.device)
        _compare_commit(request.model, adapter)
        loss = loss_of(adapter, request.loss)
        if loss.compares_units:
            given.check_beside(COMPARED_ROWS, loss=type(loss).__name__)
        if inputs.packing:
            if not request.loss.reads_tokens_only:
                raise UserError(f"packing=True: {NOT_PACKED.format(type(loss).__name__)}")
            probe.require(adapter, Variant(packing=True))

        companion = None
        if request.companion is not None:
            companion = request.companion.opened(adapter, lambda spec: probe.open(spec, world.device))
            _compare_commit(companion.spec, companion.adapter)

        # One process compares the tiny clones: it takes a second of a core, and the result is the same in all.
        def check_modes(adapter: Adapter, loss: Loss | None) -> None:
            for check in functions_of_modes("check", "check"):
                check(given, adapter, loss, packing=inputs.packing, probe=probe)

        world.from_main(lambda: check_modes(adapter, loss))
        if given.liger.use_liger_kernel:
            world.from_main(lambda: probe.require(adapter, Variant(kernels=world.device)))

        # What the planner decides, and whether the machines can do it.
        planning = Planning(inputs, adapter, loss.planned, world, companion)
        config, planned, table = planning.decide(given)
        if table is not None:
            planning = replace(planning, inputs=replace(inputs, tables={config.schedule: table}))
        config.check_micro_batches(inputs.accumulation)
        partition = cut(len(adapter.layers), config.num_stages, config.partition)
        placement = config.placed(config.schedule, table)
        if table is None and config.placement is None and all(len(rank.devices) <= 1 for rank in world.ranks):
            placement = placement.balanced(adapter.parameters_of(partition))
        if table is not None and placement.is_shared and any(len(rank.devices) > 1 for rank in world.ranks):
            raise UserError(
                f"the table {table.name!r} shares its stages, and a process has several devices; start a process for "
                "each device, or name the schedule, which makes a table for the devices"
            )
        mesh = Mesh.of(world, placement)
        links = compare_with_machines(planning, config, mesh)
        if table is not None:
            table = replace(table, placement=replace(mesh.placement, group_size=table.group_size))
        if companion is not None:
            config.check_beside(companion.mode)
            check_modes(companion.adapter, None)
        decision = cls(given, config, planned, adapter, loss, partition, mesh, links, table, planning, probe, companion)
        if decision.full_table.split:
            probe.require(adapter, Variant(splits_backward=True))
        decision.verify_modes(packing=inputs.packing)
        return decision

    def verify_modes(self, *, packing: bool) -> None:
        """Raise UnsupportedModelError where the modes do not go with the model: tiny clones say so."""
        for verify in functions_of_modes("check", "verify"):
            verify(self.config, self.adapter, packing=packing, probe=self.probe)

    @property
    def runs_windows(self) -> bool:
        """Whether the tables of the schedule are windows, in which each stage updates its weights by itself."""
        return has_windows(self.config.schedule)

    @cached_property
    def recompute(self) -> Recompute:
        """The recomputation by the table, and inside of stages."""
        return Recompute.parse(self.config.recompute, self.config.num_stages)

    @property
    def full_table(self) -> Schedule:
        """The table of training for as many micro-batches as a step has at most."""
        size = prod(cutter.most for cutter in cutters_of(self.config))
        return self.schedule(self.config.num_micro_batches * self.planning.inputs.accumulation * size, group_size=size)

    def schedule(
        self, num_micro_batches: int | Sequence[int], name: str | None = None, group_size: int = 1
    ) -> Schedule:
        """The table for this many micro-batches; by default that of training.

        Args:
            num_micro_batches: of a window it may be a list, with the number of each step.
            name: of another schedule.
            group_size: how many consecutive micro-batches depend on each other.

        Raises:
            ScheduleError: the table was read from a file and has fewer, or groups of another size.
        """
        steps = None if isinstance(num_micro_batches, int) else num_micro_batches
        total = num_micro_batches if isinstance(num_micro_batches, int) else sum(num_micro_batches)
        if self.table is not None and name is None:
            groups.check_step(self.table.name, self.table.group_size, group_size)
            table = self.table.first(total)
        else:
            name, num_stages = name or self.config.schedule, self.config.num_stages
            limits = self.recompute.of_table
            table = build(name, num_stages, total, self.world.placement, limits, steps=steps, group_size=group_size)
            table = with_modes(table, self.recompute.entries)
        for complete in functions_of_modes("table", "complete"):
            table = complete(table, self.config)
        return table

    @cached_property
    def table_of_step(self) -> Callable[[int, int, bool], Schedule]:
        """(micro-batches, size of their groups, whether stages are updated beside backwards) -> the table of a step of
        a schedule without windows. Each is made once."""

        @lru_cache(maxsize=64)
        def table(num_micro_batches: int, group_size: int, is_beside: bool) -> Schedule:
            made = self.schedule(num_micro_batches, group_size=group_size)
            return (updates_beside(made) if is_beside else None) or with_updates_last(made)

        return table

    def plan(self, batch: Batch | None = None) -> Plan:
        """Return the planner's prediction of a step of this pipeline, on the device of this process.

        Args:
            batch: the step's only mini-batch, as `train_step` takes it; None: the constructor's `example`, accumulated.

        Raises:
            UserError: there is neither, or the size of the optimizer's state is not known.
        """
        config, inputs, table = self.config, self.planning.inputs, self.table
        if batch is not None:
            inputs = replace(inputs, example=batch, accumulation=1)
            if table is not None:
                # With fewer micro-batches the table recomputes less.
                table = table.first(config.num_micro_batches)
                if config.recompute != "block":
                    config = config.replace(recompute=recompute_under(table, "stage"))
                inputs = replace(inputs, tables={config.schedule: table})
        return replace(self.planning, inputs=inputs).planner(config).plan(config)


def check_draws_alike(world: Mesh, what: str) -> None:
    """Raise UserError where stages are shared by GPUs that draw other random numbers from one seed.

    Args:
        what: the setting of what is drawn, in words.
    """
    models = world.device_models
    if world.placement.is_shared and len(models) > 1:
        raise UserError(
            f"{what}, and the stages are shared by GPUs of several models ({', '.join(models)}): a GPU recomputes what "
            "another has computed, and GPUs of another model draw other numbers from one seed; set it to 0, use GPUs "
            "of one model, or use the schedule breadth_first"
        )


def _compare_commit(spec: ModelSpec, adapter: Adapter) -> None:
    """Compare a model of the Hub, which each machine has in a cache of its own. Raises DisagreementError."""
    source = spec.model
    if isinstance(source, str) and not os.path.isdir(source):
        commit = commit_of(adapter.given_config)
        compare(lambda: {"the model's commit": commit}, source)
