"""The memory of the hosts for saving in the background: the copies that checkpoints are written from."""

from __future__ import annotations

from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import ITEM_BYTES, OPTIMIZER_SLOTS
from hf_gpipe.recipe.sizes import size_text


def copy_bytes(plan: Plan) -> list[int]:
    """For each process the bytes that it copies when a checkpoint is saved in the background.

    The leader of a stage copies the stage's weights, or its adapters alone, and the optimizer's state of whole
    parameters with float32 master weights, if there are any. The copies are there until the checkpoint is written.
    """
    inputs, settings, costs = plan.planner.inputs, plan.settings, plan.costs
    sizes = [0] * len(plan.processes)
    if inputs.copied == "nothing":
        return sizes
    state_share = OPTIMIZER_SLOTS[inputs.optim]
    if inputs.fp32_master_weights:
        state_share = (state_share + 1) * 4 / ITEM_BYTES[costs.dtype]
    sums, workers = plan.planner.sums(settings.num_micro_batches), plan.timeline.schedule.placement.workers
    for stage in plan.stages:
        owned = sums.owned(stage.layers.start, stage.layers.stop)
        weights = owned.trainable_bytes if inputs.copied == "adapters" else owned.num_bytes
        sizes[workers[stage.number][0]] += round(weights + state_share * owned.trainable_bytes)
    return sizes


def saving_text(plan: Plan) -> str:
    """The copies of a plan for people; empty where nothing is copied."""
    sizes = copy_bytes(plan)
    if plan.planner.inputs.copied == "nothing":
        return ""
    largest = max(range(len(sizes)), key=lambda number: sizes[number])
    return (
        f"in the background from copies in the memory of the hosts: {size_text(sum(sizes))} in all, at most "
        f"{size_text(sizes[largest])} (process {largest}); where processes compute on the CPU, they come on top"
    )
