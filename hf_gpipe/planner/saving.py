"""The CPU memory of a plan: the copies that checkpoints are written from, and the offloaded part of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.plan import Plan, StagePlan
from hf_gpipe.text import size_text


def copy_bytes(plan: Plan) -> list[int]:
    """The bytes that each process copies when a checkpoint is saved in the background.

    The copies are there until the checkpoint is written.
    """
    return _saved_bytes(plan) if plan.planner.inputs.saves_in_background else [0] * len(plan.processes)


def kept_bytes(plan: Plan) -> list[int]:
    """The bytes of each machine under /dev/shm for checkpoints in memory, while a new one is written beside the last.

    A machine has the files of its own processes, and with several machines also those of the machine before it. In a
    cluster of one level all processes are on one machine.
    """
    saved = _saved_bytes(plan)
    size = plan.planner.host_size(len(saved))
    own = [sum(saved[start : start + size]) for start in range(0, len(saved), size)]
    if not plan.planner.inputs.keeps_in_memory:
        return [0] * len(own)
    return [2 * (mine + (own[number - 1] if len(own) > 1 else 0)) for number, mine in enumerate(own)]


def _saved_bytes(plan: Plan) -> list[int]:
    """The bytes that each process writes of a checkpoint.

    The leader of a stage writes the stage's weights, or its adapters alone, and the optimizer's state of whole
    parameters with float32 master weights, if there are any.
    """
    inputs, costs = plan.planner.inputs, plan.costs
    sizes = [0] * len(plan.processes)
    workers = plan.timeline.schedule.placement.workers
    for stage, owned in _owned(plan):
        weights = owned.trainable_bytes if inputs.saved == "adapters" else owned.num_bytes
        # The leader has gathered the parts that all ranks have of divided layers.
        own = round(weights + inputs.saved_bytes(owned, costs.dtype))
        sizes[workers[stage.number][0]] += plan.planner.division.total(own)
    return sizes


def offloaded_bytes(plan: Plan) -> list[int]:
    """The bytes of float32 copies, their gradients and the optimizer's state in CPU memory, for each process."""
    inputs, settings, placement = plan.planner.inputs, plan.settings, plan.timeline.schedule.placement
    sizes = [0] * len(plan.processes)
    for stage, owned in _owned(plan):
        workers = placement.workers[stage.number]
        for process in workers:
            sizes[process] += round(inputs.hosted_bytes(owned, plan.costs.dtype) / settings.update_shares(len(workers)))
    return sizes


def _owned(plan: Plan) -> Iterator[tuple[StagePlan, Parameters]]:
    """Yield each stage and the size of the parameters that it owns."""
    for stage, layers in zip(plan.stages, plan.layout.stages, strict=True):
        yield stage, plan.layout.sums.owned(*layers.run)


def saving_text(plan: Plan) -> str:
    """The CPU memory that checkpoints take, for people; empty where they take none."""
    inputs, parts = plan.planner.inputs, []
    if inputs.saves_in_background:
        parts.append(f"in the background from copies in CPU memory: {_sum_text(copy_bytes(plan))}")
    if inputs.keeps_in_memory:
        kept = kept_bytes(plan)
        largest = max(range(len(kept)), key=lambda number: kept[number])
        parts.append(
            f"checkpoints in memory: at most {size_text(kept[largest])} under /dev/shm of a machine (the one of "
            f"process {largest * (len(plan.processes) // len(kept))})"
        )
    return "; ".join([*parts, "where processes compute on the CPU, this comes on top"] if parts else [])


def offload_text(plan: Plan) -> str:
    """The CPU memory that an offloaded optimizer needs, as a line of the report; empty without one."""
    if not any(offloaded_bytes(plan)):
        return ""
    return f"its state and copies of the weights are in CPU memory: {_sum_text(offloaded_bytes(plan))}"


def visits_text(plan: Plan) -> str:
    """The CPU memory of weights that visit their devices, or of graphs, as a line of the report; empty without."""
    if not any(plan.hosted_bytes):
        return ""
    beside = ", gradients and the optimizer's state" if plan.settings.visitors == "all" else ""
    return f"{hosted_words(plan)}{beside} are in CPU memory: {_sum_text(plan.hosted_bytes)}"


def hosted_words(plan: Plan) -> str:
    """Words for what is in the CPU memory of a plan."""
    return "activations" if plan.settings.visitors is None else "weights that visit"


def _sum_text(sizes: Sequence[int]) -> str:
    largest = max(range(len(sizes)), key=lambda number: sizes[number])
    return f"{size_text(sum(sizes))} in all, at most {size_text(sizes[largest])} (process {largest})"
