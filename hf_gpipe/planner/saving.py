"""The CPU memory of a plan: the copies that checkpoints are written from, and the offloaded part of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.plan import Plan, StagePlan
from hf_gpipe.text import size_text


def copy_bytes(plan: Plan) -> list[int]:
    """The bytes that each process copies when a checkpoint is saved in the background, until it is written.

    The leader of a stage writes the stage's weights, or its adapters alone, and the optimizer's state of whole
    parameters with float32 master weights, if there are any.
    """
    inputs, costs = plan.planner.inputs, plan.costs
    sizes = [0] * len(plan.processes)
    if not inputs.saves_in_background:
        return sizes
    workers = plan.timeline.schedule.placement.workers
    for stage, owned in _owned(plan):
        weights = owned.trainable_bytes if inputs.saved == "adapters" else owned.num_bytes
        # The leader has gathered the parts that all ranks have of divided layers.
        own = round(weights + inputs.saved_bytes(owned, costs.dtype))
        sizes[workers[stage.number][0]] += plan.planner.division.num_ranks * own
    return sizes


def offloaded_bytes(plan: Plan) -> list[int]:
    """The bytes of float32 copies, their gradients and the optimizer's state in CPU memory, for each process."""
    inputs, settings, placement = plan.planner.inputs, plan.settings, plan.timeline.schedule.placement
    sizes = [0] * len(plan.processes)
    for stage, owned in _owned(plan):
        workers = placement.workers[stage.number]
        for process in workers:
            sizes[process] += round(
                inputs.hosted_bytes(owned, plan.costs.dtype) / settings.shared_updates.among(len(workers))
            )
    return sizes


def _owned(plan: Plan) -> Iterator[tuple[StagePlan, Parameters]]:
    """Yield each stage and the size of the parameters that it owns."""
    for stage, layers in zip(plan.stages, plan.layout.stages, strict=True):
        yield stage, plan.layout.sums.owned(*layers.run)


def saving_text(plan: Plan) -> str:
    """The CPU memory that checkpoints take, for people; empty where they take none."""
    if not plan.planner.inputs.saves_in_background:
        return ""
    return (
        f"in the background from copies in CPU memory: {_sum_text(copy_bytes(plan))}; where processes compute on the "
        "CPU, this comes on top"
    )


def offload_text(plan: Plan) -> str:
    """The CPU memory that an offloaded optimizer needs, as a line of the report; empty without one."""
    if not any(offloaded_bytes(plan)):
        return ""
    return f"its state and copies of the weights are in CPU memory: {_sum_text(offloaded_bytes(plan))}"


def visits_text(plan: Plan) -> str:
    """The CPU memory of weights that visit their devices, or of graphs, as a line of the report; empty without."""
    if not any(plan.hosted_bytes):
        return ""
    beside = ", gradients and the optimizer's state" if plan.settings.visits.offload_weights == "all" else ""
    return f"{hosted_words(plan)}{beside} are in CPU memory: {_sum_text(plan.hosted_bytes)}"


def hosted_words(plan: Plan) -> str:
    """Words for what is in the CPU memory of a plan."""
    return "activations" if plan.settings.visits.offload_weights is None else "weights that visit"


def _sum_text(sizes: Sequence[int]) -> str:
    largest = max(range(len(sizes)), key=lambda number: sizes[number])
    return f"{size_text(sum(sizes))} in all, at most {size_text(sizes[largest])} (process {largest})"
