"""The bytes that a plan's processes send each other, and the bytes of data parallelism on as many devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import sent_share
from hf_gpipe.schedule import Schedule
from hf_gpipe.text import bytes_text, runs_text


@dataclass(frozen=True)
class Traffic:
    """Bytes that all processes together send for one row of a mini-batch.

    Attributes:
        gradients: the bytes of reductions over replicas. A ring of r replicas sends 2 (r - 1) times their size.
        boundaries: the bytes of the tensors and gradients that cross from stage to stage in different processes.
        sums: the bytes of sums over the ranks of a worker, inside of divided layers.
        data_parallel: the bytes of the reductions if every process had the whole model.
    """

    gradients: float
    boundaries: float
    sums: float
    data_parallel: float

    @property
    def total(self) -> float:
        """The bytes of the whole plan."""
        return self.gradients + self.boundaries + self.sums


def traffic(plan: Plan) -> Traffic:
    """The bytes of one step of a plan, divided by its rows."""
    layers, table, layout = plan.costs.layers, plan.timeline.schedule, plan.layout
    placement, per_byte = table.placement, sent_share(plan.settings, plan.costs.dtype)
    gradients = boundaries = in_layers = 0.0
    messages = _messages(table)
    for number, stage in enumerate(layout.stages):
        for layer in layers[stage.start : stage.stop]:
            is_again = stage.inner == "block" and layer.kind == "block"
            again = 1.0 if is_again else float(layout.recompute_shares[number])
            summed = (1 + again) * layer.forward.sums.sent_bytes + layer.backward.sums.sent_bytes
            in_layers += table.num_micro_batches * summed
        gradients += 2 * (placement.replicas[number] - 1) * layout.sums.held(*stage.run).trainable_bytes
        if number:
            (down, up), first = messages[number], layers[stage.start]
            sent = down * (first.input_bytes + stage.share.input_bytes) + up * first.gradient_input_bytes
            boundaries += per_byte * sent
    # Each rank of a worker sends its own part, or its own copy.
    num_ranks, rows = plan.planner.division.num_ranks, plan.planner.rows * plan.planner.inputs.accumulation
    whole = 2 * (num_ranks * placement.num_processes - 1) * plan.costs.total.trainable_bytes
    return Traffic(
        gradients=num_ranks * gradients / rows,
        boundaries=num_ranks * (boundaries / table.num_steps) / rows,
        sums=in_layers / table.num_steps / rows,
        data_parallel=num_ranks * whole / rows,
    )


def _messages(table: Schedule) -> dict[int, tuple[int, int]]:
    """The numbers of messages (down, up) that cross the boundary before each stage between two workers. A
    recomputation on another worker than its forward receives the inputs again."""
    counts = {stage: [0, 0] for stage in range(table.num_stages)}
    for worker, row in enumerate(table.actions):
        for action in row:
            for other in table.consumers(action) if action.kind.sends else ():
                if not other.kind.turn and table.worker_of(other) != worker:
                    counts[max(action.stage, other.stage)][action.kind.takes_gradient] += 1
    return {stage: (down, up) for stage, (down, up) in counts.items()}


def is_mesh(plan: Plan) -> bool:
    """Whether links of several kinds or replicas are part of a plan."""
    planner, placement = plan.planner, plan.timeline.schedule.placement
    return planner.cluster is not None or placement.has_replicas or not planner.division.is_whole


def mesh_lines(plan: Plan) -> list[tuple[str, str]]:
    """The cluster, the replicas and what is sent; nothing for one pipeline on equal links."""
    if not is_mesh(plan):
        return []
    placement, sent, division = plan.timeline.schedule.placement, traffic(plan), plan.planner.division
    in_layers = "" if division.is_whole else f", {bytes_text(sent.sums)} inside of layers"
    lines = [
        ("replicas", f"{runs_text(placement.replicas)} of the stages"),
        ("processes", f"{placement}, of each stage"),
        (
            "traffic",
            f"{bytes_text(sent.total)} a row ({bytes_text(sent.gradients)} gradients, {bytes_text(sent.boundaries)} "
            f"between stages{in_layers}); data parallelism on "
            f"{division.num_ranks * placement.num_processes} devices "
            f"{bytes_text(sent.data_parallel)}",
        ),
    ]
    cluster = plan.planner.cluster
    if cluster is None:
        return lines
    links = [f"{level.parts} at {level.bytes_per_second / 1e9:.4g} GB/s" for level in reversed(cluster.levels)]
    return [("cluster", f"{cluster}: {', each of '.join(links)}"), *lines]


def mesh_dict(plan: Plan) -> dict[str, Any]:
    """The content of `mesh_lines` for JSON: bytes, seconds and numbers."""
    cluster, sent = plan.planner.cluster, traffic(plan)
    return {
        "cluster": None
        if cluster is None
        else {"name": str(cluster), "levels": [asdict(level) for level in cluster.levels]},
        "replicas": plan.settings.replicas,
        "processes_of_stages": [list(own) for own in plan.timeline.schedule.placement.workers],
        "bytes_per_row": {**asdict(sent), "total": sent.total},
    }
