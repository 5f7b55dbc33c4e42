"""The limit of a plan, found by simulating the step again as if updates, copies or messages took no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.table_costs import costs_of_table
from hf_gpipe.schedule import simulate
from hf_gpipe.schedule.kinds import KINDS
from hf_gpipe.text import seconds_text

#: The share of a step below which something does not limit the step, if something else does.
_LARGE = 0.2


def limit_of_step(plan: Plan) -> str:
    """Say in one sentence what limits a step: updates, copies or messages; else the devices' rate or their waiting."""
    seconds, shorter = plan.table_seconds, _shorter(plan)
    parts = [f"{seconds_text(rest)} without {what}" for what, rest in shorter.items() if rest < 0.98 * seconds]
    least = min(shorter, key=lambda what: shorter[what])
    idle = 1 - sum(
        process.time.forward + process.time.recompute + process.time.backward for process in plan.processes
    ) / (len(plan.processes) * seconds)
    if shorter[least] < (1 - _LARGE) * seconds:
        cause = least
    elif idle > 2 * _LARGE:
        cause = _why_each_other(plan)
    elif plan.costs.is_measured:
        cause = "the layers' measured seconds"
    else:
        rate = plan.layout.processes.device.product_rate(plan.costs.compute_dtype) / 1e12
        cause = f"the layers, whose products are taken to run at {rate:.3g} TFLOP/s"
    return f"{cause}; devices compute {1 - idle:.0%} of a step{''.join(f', which is {part}' for part in parts[:1])}" + (
        f" and {', '.join(parts[1:])}" if len(parts) > 1 else ""
    )


def why_waiting(plan: Plan) -> str:
    """Say what most of a plan's bubble comes from."""
    shorter = _shorter(plan)
    least = min(shorter, key=lambda what: shorter[what])
    return least if shorter[least] < (1 - plan.bubble / 2) * plan.table_seconds else _why_each_other(plan)


def _why_each_other(plan: Plan) -> str:
    """Say why devices wait for each other: there are few micro-batches, or a stage computes longer than the others."""
    table, slowest = plan.timeline.schedule, plan.slowest_stage
    placement = table.placement
    count = -(-table.num_micro_batches // (table.num_steps * max(placement.replicas)))
    size = placement.num_processes // max(placement.replicas)
    if (size - 1) / (count + size - 1) > plan.bubble / 2:
        return f"{count} micro-batches are few for {size} devices in a row"
    mean = sum(stage.busy_seconds for stage in plan.stages) / len(plan.stages)
    if slowest.busy_seconds > (1 + plan.bubble / 2) * mean:
        return f"stage {slowest.number} computes {slowest.busy_seconds / mean:.1f} times as long as the mean"
    return "the order of the actions, in which devices wait for each other"


def _shorter(plan: Plan) -> dict[str, float]:
    """The seconds of a step in which updates, copies or messages take no time."""
    layout, table = plan.layout, plan.timeline.schedule
    costs = costs_of_table(layout)
    others: dict[str, Any] = {**(costs.others or {})}
    is_on_host = layout.inputs.is_on_host(layout.settings.visits.offload_weights)
    without = {
        "the update in CPU memory" if is_on_host else "the update": replace(costs, update_seconds=0.0),
        **{
            f"copies of {things}": replace(
                costs, others=others | {kind: 0.0 for kind in KINDS.values() if kind.copies == things}
            )
            for things in dict.fromkeys(kind.copies for kind in KINDS.values() if kind.copies and kind in table.kinds)
        },
        "messages and reductions": replace(costs, transfer_seconds=0.0, reduce_seconds=0.0, turn_transfer_seconds=0.0),
    }
    return {what: float(simulate(table, less).total_seconds) / table.num_steps for what, less in without.items()}
