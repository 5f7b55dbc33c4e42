"""The executor: interprets the table of any schedule for the stages of this process.

It knows no schedule by name. For each action it asks the channels for what the action needs, lets the stage do it,
and hands the result to the channels. Messages are announced a few actions ahead, so they arrive while the process
computes, and no send is waited for before the end of the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hf_gpipe.errors import StageError
from hf_gpipe.runtime.channel import Channel
from hf_gpipe.runtime.edges import Edge
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.schedule.actions import Action, ActionKind
from hf_gpipe.schedule.table import Schedule

#: How many messages are announced ahead of the action that reads them. Each costs one boundary's memory.
MESSAGES_AHEAD = 2


@dataclass(frozen=True)
class ActionTime:
    """When an action ran on this process: `start` is after its message had arrived; seconds of a monotonic clock."""

    action: Action
    start: float
    end: float


class Executor:
    """Runs tables on the stages of this process.

    Args:
        stages: the stages of this process, by number.
        edges: the edges at the ends of these stages; `edges[s]` lies between stage s and s + 1.
        rank: number of this process.
        device: where this process computes.
    """

    def __init__(self, stages: Mapping[int, Stage], edges: Mapping[int, Edge], rank: int, device: torch.device) -> None:
        self._stages = stages
        self._edges = edges
        self._rank = rank
        self._device = device

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        on_update: Callable[[int], None] | None = None,
        times: list[ActionTime] | None = None,
    ) -> None:
        """Run this process's part of the table once.

        Args:
            schedule: a valid table for these stages and this many micro-batches.
            micro_batches: the same on every process.
            on_update: called for each U, with the stage.
            times: where to note when each action ran; None: nothing is measured.

        Raises:
            StageError: an action failed; names the process, the stage, the action and the micro-batch.
        """
        micro_batches = [self._on_device(micro_batch) for micro_batch in micro_batches]
        actions = schedule.actions[self._rank]
        messages = deque(action for action in actions if self._reads_message(action))
        announced = 0
        action = None
        try:
            for action in actions:
                while messages and announced < MESSAGES_AHEAD:
                    self._announce(messages.popleft(), micro_batches)
                    announced += 1
                received: dict[str, torch.Tensor] = {}
                if self._reads_message(action):
                    received = self._channel(action).receive(_index(action))
                    announced -= 1
                start = self._now() if times is not None else 0.0
                if action.kind == ActionKind.UPDATE:
                    if on_update is not None:
                        on_update(action.stage)
                else:
                    self._perform(schedule, action, micro_batches[_index(action)], received)
                if times is not None:
                    times.append(ActionTime(action, start, self._now()))
            for edge in self._edges.values():
                edge.down.flush()
                edge.up.flush()
        except Exception as error:
            self._reset()
            where = f"stage {action.stage}, action {action}" if action is not None else "before the first action"
            raise StageError(f"process {self._rank}, {where}: {type(error).__name__}: {error}") from error

    def _perform(
        self, schedule: Schedule, action: Action, micro_batch: MicroBatch, received: dict[str, torch.Tensor]
    ) -> None:
        """Do F, R or B and send what it gives."""
        number, index = action.stage, micro_batch.index
        stage = self._stages[number]
        if action.kind == ActionKind.RECOMPUTE:
            stage.recompute(index)
        elif action.kind == ActionKind.FORWARD:
            context = Context(micro_batch, received)
            if schedule.is_training:
                outputs = stage.forward(context, keep_graph=schedule.keeps_graph(number, index))
            else:
                outputs = stage.evaluate(context)
            if not stage.model.is_last:
                self._edges[number].down.send(index, outputs, stage.output_shapes(micro_batch))
        else:
            gradients = stage.backward(index, received)
            if gradients:
                self._edges[number - 1].up.send(index, gradients, stage.input_gradient_shapes(micro_batch))

    def _reads_message(self, action: Action) -> bool:
        stage = self._stages[action.stage]
        if action.kind == ActionKind.FORWARD:
            return not stage.model.is_first
        return action.kind == ActionKind.BACKWARD and any(stage.trainable_outputs.values())

    def _channel(self, action: Action) -> Channel:
        """The channel that an action's message arrives on."""
        if action.kind == ActionKind.FORWARD:
            return self._edges[action.stage - 1].down
        return self._edges[action.stage].up

    def _announce(self, action: Action, micro_batches: Sequence[MicroBatch]) -> None:
        stage, micro_batch = self._stages[action.stage], micro_batches[_index(action)]
        if action.kind == ActionKind.FORWARD:
            shapes = stage.input_shapes(micro_batch)
        else:
            shapes = stage.output_gradient_shapes(micro_batch)
        self._channel(action).expect(micro_batch.index, shapes)

    def _on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        if self._device.type == "cpu":
            return micro_batch
        inputs = {name: t.to(self._device, non_blocking=True) for name, t in micro_batch.inputs.items()}
        return replace(micro_batch, inputs=inputs)

    def _now(self) -> float:
        """The time, once the device has done what it was given; only a step that is measured asks for it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _reset(self) -> None:
        """Leave nothing of a failed step behind: its messages and micro-batches would meet the next one's."""
        for stage in self._stages.values():
            stage.reset()
        for edge in self._edges.values():
            edge.down.reset()
            edge.up.reset()


def _index(action: Action) -> int:
    assert action.micro_batch is not None, f"{action} has no micro-batch"
    return action.micro_batch
