"""What is decided for a pipeline, the same in all processes, before any weight is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_gpipe.adapters import Adapter, is_known_exact
from hf_gpipe.model.chunks import verify_chunks
from hf_gpipe.model.exactness import verify, verify_packing
from hf_gpipe.model.opening import open_model
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline.request import PipelineRequest
from hf_gpipe.pipeline.tables import Tables
from hf_gpipe.planner.decide import Planning, settled
from hf_gpipe.planner.links import Machines
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.preflight import compare_with_machines
from hf_gpipe.recipe import DecidedConfig, PipelineConfig
from hf_gpipe.runtime.chunks import check_chunks
from hf_gpipe.runtime.custom_loss import loss_of
from hf_gpipe.runtime.device_choice import DeviceChoice, world_for
from hf_gpipe.runtime.loss import Loss
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.runtime.world import World
from hf_gpipe.schedule.file import recompute_under
from hf_gpipe.schedule.table import Schedule


@dataclass(frozen=True)
class Decision:
    """A model, cut into stages that have their places, and the tables to run.

    Attributes:
        given: the configuration that was asked for; "auto" where the planner decides what was not given.
        config: the same without "auto".
        planned: the planner's choice and the reason, in one line; None if it had nothing to decide.
        adapter: of the model.
        loss: of training.
        partition: the layers of each stage.
        world: where the stages are.
        links: lines about the links between machines.
        tables: of the schedule.
        planning: the planner's inputs.
    """

    given: PipelineConfig
    config: DecidedConfig
    planned: str | None
    adapter: Adapter
    loss: Loss
    partition: Sequence[range]
    world: World
    links: Sequence[str]
    tables: Tables
    planning: Planning

    @classmethod
    def of(cls, request: PipelineRequest, device: DeviceChoice) -> Decision:
        """Decide. Every process calls it, with the same request, and with its device.

        Raises UserError, on every process, where the request cannot be met.
        """
        # The processes, and what is asked of their number.
        world = world_for(request.config, device)
        inputs = request.inputs
        given = settled(request.config, inputs, world)
        # Read before any weight is made: a table that cannot be run costs no time.
        table = world.from_reader(lambda: given.table(inputs.accumulation, world.num_processes))
        if table is not None:
            given = replace(given, recompute=recompute_under(table, given.recompute))
            inputs = replace(inputs, tables={given.schedule: table})

        # The model without its weights.
        adapter = open_model(request.model, world.device)
        request.compare_commit(adapter)
        loss = loss_of(adapter, request.loss)
        if inputs.packing:
            verify_packing(adapter)
        if given.sequence_chunks > 1:
            check_chunks(adapter, is_loss_of_tokens=loss.is_of_tokens, packing=inputs.packing)

        # What the planner decides, and whether the machines can do it.
        planning = Planning(inputs, adapter, loss.planned, world, Machines.of(world))
        config, planned = planning.decide(given)
        config.check_micro_batches(inputs.accumulation)
        partition = cut(len(adapter.layers), config.num_stages, config.partition)
        recompute = Recompute.parse(config.recompute, config.num_stages).of_table
        placement = config.placed(config.schedule) if table is None else table.placement
        world = world.placed(placement)
        links = compare_with_machines(planning, config, world)
        if table is not None:
            table = replace(table, placement=world.placement)
        tables = Tables(config.schedule, world.placement, recompute, table)
        decision = cls(given, config, planned, adapter, loss, partition, world, links, tables, planning)
        if decision.table.split and not is_known_exact(adapter):
            verify(adapter, splits_backward=True)
        if config.sequence_chunks > 1:
            verify_chunks(adapter, recomputes_blocks="block" in config.recompute)
        return decision

    @property
    def table(self) -> Schedule:
        """The table of a step of as many micro-batches as a step has at most."""
        chunks = self.config.sequence_chunks
        count = self.config.num_micro_batches * self.planning.inputs.accumulation * chunks
        return self.tables.of(count, chunks=chunks)

    def plan(self, batch: Batch | None = None) -> Plan:
        """The planner's prediction of a step; see `Pipeline.plan`."""
        config, inputs, table = self.config, self.planning.inputs, self.tables.given
        if batch is not None:
            inputs = replace(inputs, example=batch, accumulation=1)
            if table is not None:
                # With fewer micro-batches the table recomputes less.
                table = table.of_first(config.num_micro_batches)
                if config.recompute != "block":
                    config = replace(config, recompute=recompute_under(table, "stage"))
                inputs = replace(inputs, tables={config.schedule: table})
        return replace(self.planning, inputs=inputs).planner(config).plan(config)
