"""The bytes that a plan's processes send each other, beside those of data parallelism on as many devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import sent_share
from hf_gpipe.text import bytes_text


@dataclass(frozen=True)
class Traffic:
    """Bytes that all processes together send for one row of a mini-batch.

    Attributes:
        gradients: of reductions over replicas. A ring of r replicas sends 2 (r - 1) times the stage's gradients.
        boundaries: of the tensors and gradients that cross from stage to stage in different processes.
        data_parallel: of the reductions if every process had the whole model.
    """

    gradients: float
    boundaries: float
    data_parallel: float

    @property
    def total(self) -> float:
        """Of the plan."""
        return self.gradients + self.boundaries


def traffic(plan: Plan) -> Traffic:
    """The bytes of one step of a plan, divided by its rows."""
    layers, table = plan.costs.layers, plan.timeline.schedule
    sums, placement = plan.planner.sums(plan.settings.num_micro_batches), table.placement
    gradients = boundaries = 0.0
    share = sent_share(plan.settings.boundary_dtype, plan.costs.dtype)
    for stage in plan.stages:
        gradient_bytes = sums.held(stage.layers.start, stage.layers.stop).trainable_bytes
        gradients += 2 * (placement.replicas[stage.number] - 1) * gradient_bytes
        if stage.number:
            own, before = placement.workers[stage.number], placement.workers[stage.number - 1]
            micro_batches = range(table.num_micro_batches)
            num_messages = sum(own[m % len(own)] != before[m % len(before)] for m in micro_batches)
            first = layers[stage.layers.start]
            boundaries += num_messages * share * (first.input_bytes + first.gradient_input_bytes)
    rows = plan.planner.rows * plan.planner.inputs.accumulation
    boundaries /= table.num_steps
    whole = 2 * (placement.num_processes - 1) * plan.costs.total.trainable_bytes
    return Traffic(gradients / rows, boundaries / rows, whole / rows)


def is_mesh(plan: Plan) -> bool:
    """Whether links of several kinds or replicas are part of a plan."""
    return plan.planner.cluster is not None or plan.timeline.schedule.placement.has_replicas


def mesh_lines(plan: Plan) -> list[tuple[str, str]]:
    """The cluster, the replicas and what is sent; nothing for one pipeline on equal links."""
    if not is_mesh(plan):
        return []
    placement, sent = plan.timeline.schedule.placement, traffic(plan)
    lines = [
        ("replicas", f"{'-'.join(map(str, placement.replicas))}, processes of each stage {placement}"),
        (
            "traffic",
            f"{bytes_text(sent.total)} a row ({bytes_text(sent.gradients)} gradients, {bytes_text(sent.boundaries)} "
            f"between stages); data parallelism on {placement.num_processes} devices {bytes_text(sent.data_parallel)}",
        ),
    ]
    cluster = plan.planner.cluster
    if cluster is None:
        return lines
    links = [f"{level.parts} at {level.bytes_per_second / 1e9:.4g} GB/s" for level in reversed(cluster.levels)]
    return [("cluster", f"{cluster}: {', each of '.join(links)}"), *lines]


def mesh_dict(plan: Plan) -> dict[str, Any]:
    """The same for JSON: bytes, seconds and numbers."""
    cluster, sent = plan.planner.cluster, traffic(plan)
    return {
        "cluster": None
        if cluster is None
        else {"name": str(cluster), "levels": [asdict(level) for level in cluster.levels]},
        "replicas": plan.settings.replicas,
        "processes_of_stages": [list(own) for own in plan.timeline.schedule.placement.workers],
        "bytes_per_row": {**asdict(sent), "total": sent.total},
    }
