"""The memory bill: what a process holds at the fullest moment of a step, item by item.

Weights, optimizer state, buffers and the mini-batch's ids are there all the time. What comes and goes is read off the
simulated table: for every action the boundary tensors, graphs and gradients that are alive, and what the action itself
works with. The moment at which all of this is the most decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from hf_gpipe.planner.costs import InnerRecompute, ModelCosts
from hf_gpipe.schedule import Action, ActionKind, Span, Timeline


@dataclass(frozen=True)
class MemoryBill:
    """Bytes at the fullest moment of a step."""

    parameters: int = 0
    """Weights, a tied one once a process, and buffers."""
    gradients: int = 0
    """Of the weights."""
    optimizer: int = 0
    """Its state, where the weight is owned."""
    boundaries: int = 0
    """Received boundary tensors, and the micro-batches' ids, masks and labels."""
    activations: int = 0
    """What the live graphs keep, the head's apart."""
    logits: int = 0
    """What the live graphs keep of the head and the loss."""
    early_gradients: int = 0
    """Gradients that have come before their backward could begin."""
    working: int = 0
    """Of the action that runs at that moment."""
    reserve: int = 0
    """Held by the allocator beyond all of these."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StageLayers:
    """A stage of a plan: the run of layers `start` to `stop` (exclusive)."""

    start: int
    stop: int
    inner: InnerRecompute
    """What its live graphs keep."""


Ran: TypeAlias = Sequence[Mapping[Action, Span]]
"""When each action of each stage ran."""


def ran(timeline: Timeline) -> Ran:
    """A timeline's spans, stage by stage."""
    stages: list[dict[Action, Span]] = [{} for _ in range(timeline.schedule.num_stages)]
    for span in timeline.spans:
        stages[span.action.stage][span.action] = span
    return stages


def bill(
    costs: ModelCosts,
    stages: Sequence[StageLayers],
    spans: Ran,
    own: Sequence[int],
    state_share: float,
    reserved_share: float,
) -> MemoryBill:
    """What a process with the stages `own` holds at the fullest moment of a step.

    Args:
        costs: of one micro-batch.
        stages: all stages, in order.
        spans: of the simulated table.
        own: the process's stages. With one of several, what that stage alone needs.
        state_share: bytes of the optimizer's state a byte of trainable weights.
        reserved_share: of the device.
    """
    ranges = [(stages[stage].start, stages[stage].stop) for stage in own]
    held = costs.held_by(ranges)
    owned = sum(costs.owned(*layers).trainable_bytes for layers in ranges)
    buffers = sum(costs.layers[index].buffer_bytes for layers in ranges for index in range(*layers))
    kept = [one for stage in own for one in _kept(costs, stages, spans, stage, held.trainable_bytes / len(own))]
    fullest = _fullest(kept)
    num_micro_batches = sum(action.kind == ActionKind.FORWARD for action in spans[0])
    ids = num_micro_batches * costs.micro_batch_bytes
    return MemoryBill(
        parameters=held.num_bytes + buffers,
        gradients=round(fullest.get("gradients", 0)),
        optimizer=round(state_share * owned),
        boundaries=round(fullest.get("boundaries", 0)) + ids,
        activations=round(fullest.get("activations", 0)),
        logits=round(fullest.get("logits", 0)),
        early_gradients=round(fullest.get("early_gradients", 0)),
        working=round(fullest.get("working", 0)),
        reserve=round(reserved_share * sum(fullest.values())),
    )


Kept: TypeAlias = tuple[float, float, str, float]
"""(from, until, item of the bill, bytes)."""


def _kept(
    costs: ModelCosts, stages: Sequence[StageLayers], spans: Ran, stage: int, gradient_bytes: float
) -> Iterable[Kept]:
    """What comes and goes on one stage."""
    own, num_stages, here = stages[stage], len(stages), spans[stage]
    layers = costs.layers[own.start : own.stop]
    graph = costs.saved_bytes(own.start, own.stop, own.inner)
    head = layers[-1].kept(own.inner) if layers[-1].kind == "head" else 0
    peaks = Peaks.of(costs, own)
    backwards = [span for action, span in here.items() if action.kind == ActionKind.BACKWARD]
    first_backward = min(backwards, key=lambda span: span.end)
    for forward in [action for action in here if action.kind == ActionKind.FORWARD]:
        first, last = here[forward], here[Action(ActionKind.BACKWARD, stage, forward.micro_batch)]
        again = here.get(Action(ActionKind.RECOMPUTE, stage, forward.micro_batch))
        if (source := forward.source(num_stages)) is not None:
            yield float(spans[stage - 1][source].end), float(last.end), "boundaries", layers[0].input_bytes
        if (source := last.action.source(num_stages)) is not None:
            # From the start of its backward on it is working memory of that.
            came = float(spans[stage + 1][source].end)
            yield came, float(last.start), "early_gradients", costs.layers[own.stop].gradient_input_bytes
        if again is not None:
            yield float(first.start), float(first.end), "working", peaks.forward_only
        maker = again or first
        yield float(maker.start), float(maker.end), "working", peaks.forward
        yield float(maker.end), float(last.end), "activations", graph - head
        yield float(maker.end), float(last.end), "logits", head
        yield float(last.start), float(last.end), "working", max(peaks.backward - graph, 0)
        if last is first_backward:
            yield float(last.start), float(last.end), "gradients", peaks.first_backward - peaks.backward
    yield float(first_backward.end), math.inf, "gradients", gradient_bytes


@dataclass(frozen=True)
class Peaks:
    """The most that an action of a stage needs above the stage's input, its own graph included."""

    forward_only: int
    forward: int
    backward: int
    first_backward: int
    """With the gradients of the weights, which come as the graph goes; later backwards find them there."""

    @classmethod
    def of(cls, costs: ModelCosts, stage: StageLayers) -> Peaks:
        """Of one stage, as costs.py defines them."""
        layers, inner = costs.layers[stage.start : stage.stop], stage.inner
        made_outside = costs.saved_bytes(stage.start, stage.stop, inner) - sum(
            layer.kept(inner) + (layer.kept_input(inner) if index else 0) for index, layer in enumerate(layers)
        )
        kept, gradients = made_outside, sum(layer.parameters.trainable_bytes for layer in layers)
        forward = backward = first_backward = 0
        for index, layer in enumerate(layers):
            kept += layer.kept_input(inner) if index else 0
            forward = max(forward, kept + layer.forward_working_bytes)
            kept += layer.kept(inner)
            working = layer.backward_working_bytes if inner == "none" else layer.block_backward_working_bytes
            backward = max(backward, kept + working)
            first_backward = max(first_backward, kept + working + gradients)
            gradients -= layer.parameters.trainable_bytes
        return cls(max(layer.forward_only_working_bytes for layer in layers), forward, backward, first_backward)


def _fullest(kept: Iterable[Kept]) -> dict[str, float]:
    """The bytes of each item at the moment at which their sum is the largest. An end makes room for a start."""
    changes: list[tuple[float, int, str, float]] = []
    for start, end, item, size in kept:
        if size and end > start:
            changes += [(start, 1, item, size), (end, 0, item, -size)]
    changes.sort(key=lambda change: change[:2])
    level: dict[str, float] = {}
    total = most = 0.0
    fullest: dict[str, float] = {}
    for index, (time, is_start, item, size) in enumerate(changes):
        level[item] = level.get(item, 0) + size
        total += size
        is_last_of_its_moment = index + 1 == len(changes) or changes[index + 1][0] > time
        if is_start and is_last_of_its_moment and total > most:
            most, fullest = total, dict(level)
    return fullest
