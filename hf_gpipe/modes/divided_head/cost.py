"""The cost of a divided head: seconds of S and T, bytes of each part, and the hidden states that all stages get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_gpipe.modes.divided_head.table import (
    HEAD_INPUT,
    HEAD_WORKING,
    HELD_LOGITS,
    LOGITS,
    LOGITS_GRADIENT,
    head_communicators,
)
from hf_gpipe.planner.costs.model_costs import (
    NO_OPERATIONS,
    GraphCost,
    ModelCosts,
    Parameters,
    Part,
    Seconds,
    estimated_seconds,
)
from hf_gpipe.planner.costs.stage_costs import StageCosts, StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.schedule import Schedule
from hf_gpipe.schedule.kinds import ActionKind
from hf_gpipe.schedule.messages import Link


@dataclass(frozen=True)
class HeadPart(Part):
    """The part of a divided head that each stage has, for one micro-batch."""

    logits_seconds: float
    """The seconds of S."""
    gradient_seconds: float
    """The seconds of T."""
    hidden_bytes: int
    """The bytes of the hidden states, which their gradient has too."""
    logits_bytes: int
    """The bytes that are kept from S to T beside the hidden states."""
    working_bytes: int


def links(table: Schedule) -> tuple[Link, ...]:
    """The connections for messages about the head."""
    return head_communicators(table.placement) if LOGITS in table.kinds else ()


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of S and T of each stage."""
    if not isinstance(part := layout.sums.part, HeadPart):
        return {}
    speeds = layout.processes.speeds_of(layout.table.placement)
    return {
        LOGITS: [part.logits_seconds / speed for speed in speeds],
        LOGITS_GRADIENT: [part.gradient_seconds / speed for speed in speeds],
    }


def turn_transfer_seconds(layout: Layout) -> float:
    """The seconds in which the last stage's link carries the hidden states to every other stage."""
    if not isinstance(part := layout.sums.part, HeadPart):
        return 0.0
    placement = layout.table.placement
    count = placement.num_stages - 1
    messages = layout.processes.network(placement).transfer_seconds([part.hidden_bytes] * count)
    return count * max(messages.values(), default=0.0)


def amounts(sums: StageCosts, stage: StageLayers, _: Mapping[str, float]) -> dict[str, Mapping[str, float]]:
    """The bytes that a stage's part of the head keeps."""
    if not isinstance(part := sums.part, HeadPart):
        return {}
    # The last stage has the hidden states from its own F.
    is_last = stage.stop == len(sums.costs.layers)
    return {
        HEAD_INPUT: {"boundaries": 0 if is_last else part.hidden_bytes},
        HELD_LOGITS: {"logits": part.logits_bytes + part.hidden_bytes},
        HEAD_WORKING: {"working": part.working_bytes},
    }


def divided(costs: ModelCosts, device: Device, num_stages: int) -> tuple[ModelCosts, HeadPart]:
    """The costs with a last layer that holds and costs nothing, and the part of the head that each stage has."""
    head = costs.layers[-1]
    seconds = head.seconds or estimated_seconds(head, costs.compute_dtype, device)
    # There are three products of the same size, and the first of them is in S.
    third = (seconds.forward + seconds.backward) / 3 / num_stages
    whole = sum((shared.size for shared in head.shared), start=head.parameters)
    num_positions = costs.workload.num_target_tokens
    width = head.input_bytes // (num_positions * (whole.num_bytes // max(whole.count, 1)) or 1) or 1
    hidden = head.input_bytes
    part = HeadPart(
        held=whole.divided(num_stages),
        tie=head.shared[0].name if head.shared else "",
        logits_seconds=third,
        gradient_seconds=2 * third,
        hidden_bytes=hidden,
        logits_bytes=whole.num_bytes // width * num_positions // num_stages,
        working_bytes=head.plain.backward_working_bytes // num_stages + 2 * hidden,
    )
    nothing = GraphCost(0, 0, 0, 0)
    empty = replace(
        head,
        parameters=Parameters(),
        shared=(),
        buffer_bytes=0,
        converted_bytes=0,
        forward=NO_OPERATIONS,
        backward=NO_OPERATIONS,
        forward_working_bytes=0,
        forward_only_working_bytes=0,
        plain=nothing,
        block=nothing,
        seconds=None if head.seconds is None else Seconds(0.0, 0.0, 0.0),
        sums_beside=(),
    )
    return replace(costs, layers=(*costs.layers[:-1], empty)), part
