"""The planner of a model that has its adapter: its layers are traced for each size of micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from hf_gpipe.adapters import Adapter
from hf_gpipe.losses.loss import PLAIN, Loss
from hf_gpipe.model.companion import OpenCompanion
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.costs.stage_costs import Share, StageCosts
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.registry import functions_of_modes, parts_of_modes
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.pipeline import PipelineConfig


def planner_of(
    adapter: Adapter,
    inputs: PlanInputs,
    device: Device,
    config: PipelineConfig | None = None,
    *,
    loss: Loss = PLAIN,
    as_on_gpu: bool = False,
    seconds: Callable[[Workload, ModelCosts], ModelCosts] | None = None,
    cluster: Cluster | None = None,
    companion: OpenCompanion | None = None,
    tracer: Callable[[], LayerTracer] | None = None,
) -> Planner:
    """Make the planner of a model that has its adapter.

    Args:
        config: the configuration, whose limits of memory, speeds and division of layers the planner gets. None: the
            memory of the device is the limit, all processes are as fast, and layers are whole.
        as_on_gpu: whether the stages will run on GPUs, whose attention keeps less.
        seconds: gives the traced costs of a micro-batch, or of a member of a group, the seconds that were measured;
            None: seconds are estimated.
        companion: the model beside the trained one, whose seconds are estimated; None: there is none.
        tracer: gives the tracer of the layers, which has what it has traced; None: a new one.

    Raises:
        UserError: there is no mini-batch, the optimizer's state has no known size, or layers cannot be divided so.
    """
    config = config or PipelineConfig(1)
    device = device.summing_in_float16() if inputs.fp16_accumulation else device
    mini_batch = inputs.mini_batch(adapter)
    tracer = tracer or cache(lambda: LayerTracer(adapter, loss=loss, as_on_gpu=as_on_gpu, division=config.division))

    def costs_of(rows: int, groups: Groups) -> Sequence[ModelCosts]:
        def with_seconds(workload: Workload) -> ModelCosts:
            costs = tracer().costs(workload)
            return costs if seconds is None else seconds(workload, costs)

        return costs_of_members(mini_batch.with_rows(rows), groups, with_seconds)

    possible = {
        name for of_mode in functions_of_modes("search", "possible") for name in of_mode(adapter, loss, mini_batch)
    }
    shares = None
    if companion is not None:
        mode, other = companion.mode, companion.adapter
        layers = cache(lambda: LayerTracer(other, as_on_gpu=as_on_gpu, division=config.division))
        sums = cache(lambda rows: StageCosts(layers().costs(mini_batch.with_rows(rows)), device))
        possible -= config.modes[mode].excludes.keys()

        def shares(rows: int, num_stages: int) -> Sequence[Share]:
            own: Sequence[Share] = parts_of_modes("cost")[mode].shares(sums(rows), num_stages)
            return own

    vocabulary = adapter.config.get_text_config().vocab_size if inputs.new_tokens else 0
    inputs = replace(inputs, example=mini_batch, vocabulary=vocabulary)
    limits = config.memory_bytes, cluster, config.given_speeds
    planner = Planner(costs_of, inputs, device, *limits, config.division, shares)
    planner.possible = frozenset(possible)
    planner.num_forwards = inputs.forwards + loss.num_forwards(has_reference=adapter.peft is not None)
    if inputs.new_tokens:
        planner.generation_costs = lambda rows, tokens: tracer().costs(
            replace(mini_batch, rows=rows, source_tokens=tokens, target_tokens=tokens)
        )
    return planner


def costs_of_members(
    workload: Workload, groups: Groups, costs_of: Callable[[Workload], ModelCosts]
) -> tuple[ModelCosts, ...]:
    """The costs of each member of the group that a micro-batch is cut into, which may be the micro-batch itself."""
    own = workload.members(groups) if groups.size > 1 else [workload]
    # A tracer reads off the members between these, where all are equally long.
    first = [*{0, len(own) - 1, len(own) // 2}]
    costs = {number: costs_of(own[number]) for number in [*first, *range(len(own))]}
    return tuple(costs[number] for number in range(len(own)))
