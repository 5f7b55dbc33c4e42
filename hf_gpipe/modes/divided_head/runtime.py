"""How the executor performs S and T, what F and the backward of the last stage do for them, and their messages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from hf_gpipe.adapters.base import Inputs
from hf_gpipe.modes.divided_head.head_part import HeadPart
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.generation import Generator
from hf_gpipe.runtime.micro_batch import StepOptions
from hf_gpipe.runtime.performing import perform
from hf_gpipe.runtime.step import Message, ModeState, Performed, Planned, Rows, Run, Step, Tensors
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD
from hf_gpipe.schedule.table import Schedule

NAME = "divided_head"


class State(ModeState):
    """The parts of the head that this process's stages have, and the edges between them and the last stage.

    Args:
        parts: of each stage of this process, by number; none where the head is whole.
        edges: by (stage, its worker, the worker of the last stage).
    """

    def __init__(self, rows: Rows, parts: Mapping[int, HeadPart] | None = None, edges: Edges | None = None) -> None:
        super().__init__(rows)
        self.parts, self._edges = parts or {}, edges or {}
        self.channels = [way for edge in self._edges.values() for way in (edge.down, edge.up)]

    def message(self, source: Action, consumer: Action, sender: int, receiver: int) -> Message | None:
        if not (source.kind.turn or consumer.kind.turn):
            return None
        assert source.micro_batch is not None
        key = source.micro_batch, source.kind.turn
        shapes = partial(self.parts[source.stage if sender in self.rows else consumer.stage].shapes, source)
        if source.stage < consumer.stage:
            return Message(self._edges[source.stage, sender, receiver].down, key, shapes)
        return Message(self._edges[consumer.stage, receiver, sender].up, key, shapes)

    def begin(self, options: StepOptions) -> None:
        for part in self.parts.values():
            part.begin(options)

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    def next_logits(self, generator: Generator, outputs: Tensors, inputs: Inputs, num_rows: int) -> torch.Tensor | None:
        if not self.parts:
            return None
        part, adapter = next(iter(self.parts.values())), generator.adapter
        width = adapter.carry_shapes(len(adapter.layers) - 1, inputs)["hidden"][-1]
        hidden = torch.empty(num_rows, 1, width, dtype=part.dtype_of("hidden"), device=generator.device)
        if "hidden" in outputs:
            hidden = outputs["hidden"][:, -1:].contiguous()
        hidden = generator.from_last("decoder", hidden)
        logits = torch.zeros(num_rows, 1, part.size, device=generator.device)
        for stage, own in self.parts.items():
            if generator.runs(stage):
                logits += own.logits(hidden, inputs).float()
        if generator.group is None:
            return generator.world.all_reduce(logits)
        dist.all_reduce(logits, group=generator.group)
        return logits

    def wrap(self, schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
        """Let F of the last stage keep the hidden states for S, and let its backward begin with what T has left."""
        if LOGITS not in schedule.kinds or action.stage != schedule.num_stages - 1:
            return performed
        if action.kind == FORWARD:
            return performed._replace(run=_forward(performed.run))
        return performed._replace(run=_backward(performed.run)) if action.kind.takes_gradient else performed


def _part(step: Step, planned: Planned) -> HeadPart:
    state: State = step.modes[NAME]
    return state.parts[planned.action.stage]


def _logits(step: Step, planned: Planned, received: Tensors) -> Tensors:
    part, context = _part(step, planned), step.context(planned, received)
    message, outputs = part.score(context, is_training=step.schedule.is_training)
    if outputs:
        step.result.outputs[planned.index] = outputs
    return message


def _logits_gradient(step: Step, planned: Planned, received: Tensors) -> Tensors:
    return _part(step, planned).add_gradient(step.context(planned, received))


perform(LOGITS, _logits)
perform(LOGITS_GRADIENT, _logits_gradient)


def _forward(run: Run) -> Run:
    def forward(step: Step, planned: Planned, received: Tensors) -> Tensors:
        outputs = run(step, planned, received)
        _part(step, planned).take(planned.index, outputs)
        return outputs

    return forward


def _backward(run: Run) -> Run:
    def backward(step: Step, planned: Planned, received: Tensors) -> Tensors:
        gradients = _part(step, planned).gradient(step.context(planned, {}), received)
        return run(step, planned, gradients)

    return backward
