"""The bytes that a plan's processes send each other, and the bytes of data parallelism on as many devices."""

from __future__ import annotations

from dataclasses import dataclass

from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import sent_share
from hf_gpipe.schedule import Schedule


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
