"""Where to cut a model: the slowest stage is the least, under the limit of memory and the table's own demands."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition import COST_STRATEGIES, by_cost
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.memory import StageLayers
from hf_gpipe.planner.plan import Planner, inner_recompute, recompute_shares
from hf_gpipe.recipe import AUTO, DecidedConfig


def choose_partition(planner: Planner, settings: DecidedConfig, strategy: str | Sequence[int]) -> tuple[int, ...]:
    """The number of layers of each stage.

    Args:
        planner: of the model.
        settings: their schedule, M, recompute and processes say what a stage costs and holds; not their partition.
        strategy: "count", "parameters", "flops", "profile" (seconds, which must have been measured), "auto" (seconds,
            measured or not), or a list.

    Raises:
        PartitionError: no split meets the planner's limit of memory, or `partition` raises it.
    """
    num_micro_batches = settings.num_micro_batches
    costs = planner.costs(num_micro_batches)
    if strategy not in (*COST_STRATEGIES, AUTO):
        return tuple(len(stage) for stage in cut(len(costs.layers), settings.num_stages, strategy))
    cut(len(costs.layers), settings.num_stages)
    sums = planner.sums(num_micro_batches)
    if strategy == "profile" and not costs.is_measured:
        raise PartitionError(
            "partition 'profile' needs measured layers, and none were measured; plan with --profile, or use flops."
        )
    table, bound = planner.table(settings), planner.memory_bound(settings)
    shares, inner = recompute_shares(table), inner_recompute(settings)
    placement = table.placement

    def seconds(stage: int, start: int, stop: int) -> float:
        share = shares[stage]
        forward = (
            (1 + share) * sums.forward_seconds(start, stop)
            if share < 1
            else sums.forward_only_seconds(start, stop) + sums.forward_seconds(start, stop)
        )
        return forward + sums.backward_seconds(start, stop, inner[stage])

    def flops(stage: int, start: int, stop: int) -> float:
        return (1 + shares[stage]) * sums.forward_flops(start, stop) + sums.backward_flops(start, stop)

    def parameters(_: int, start: int, stop: int) -> float:
        return sums.held(start, stop).num_bytes

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        return bound.stage_bytes(stage, StageLayers(start, stop, inner[stage]))

    cost = {"parameters": parameters, "flops": flops}.get(str(strategy), seconds)
    most_stages = max(len(placement.stages_of(process)) for process in range(placement.num_processes))
    cap = None if planner.memory_bytes is None else planner.memory_bytes / most_stages
    boundaries = [layer.input_bytes for layer in costs.layers]
    # A run of layers may keep less than a part of it by as much as its ends' boundaries differ.
    dip = 2 * planner.micro_batches_of_step(num_micro_batches) * (max(boundaries) - min(boundaries[1:], default=0))
    return by_cost(
        planner.num_layers,
        settings.num_stages,
        cost,
        memory_bytes,
        cap,
        memory_dip_bytes=dip * (1 + planner.device.reserved_share),
    )
