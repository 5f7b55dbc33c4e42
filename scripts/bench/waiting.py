"""Stand-ins that wait: of a stage, of its part of a divided head, and of the copies of weights that visit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from bench.slow_links import wait_until
from hf_gpipe.adapters.modules.batch_norm import BatchNorms
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.schedule import Costs, Schedule, kinds
from hf_gpipe.schedule.actions import Action

#: Layers of a stage with replicas, whose gradients are reduced one after another.
_NUM_LAYERS = 8


class WaitingStage:
    """Has the part of `Stage` that the executor uses, and waits.

    Attributes:
        parameters: with replicas one for each of several layers, which share the backward evenly.
    """

    def __init__(self, table: Schedule, seconds: Mapping[Action, float], number: int, boundary: torch.Tensor) -> None:
        self._number, self._seconds = number, seconds
        self.is_first, self.is_last = number == 0, number == table.num_stages - 1
        count = _NUM_LAYERS if table.placement.has_replicas else 0
        self.parameters = {f"{number}.{i}": torch.nn.Parameter(torch.zeros(1)) for i in range(count)}
        self.device = boundary.device
        self.trainable_outputs: Mapping[str, bool] = {} if self.is_last else {"hidden": True}
        self.trainable_inputs: Mapping[str, bool] = {} if self.is_first else {"hidden": True}
        self._message = {"hidden": boundary}
        self._shapes: Shapes = {"hidden": tuple(boundary.shape)}
        self._divides_head = table.has_turns
        # It normalises no batches, and its model has no other layers.
        self.batch_norms = BatchNorms(torch.nn.Identity())
        self.adapter = SimpleNamespace(reference=torch.nn.Identity())

    def _of(self, kind: kinds.ActionKind, micro_batch: int) -> float:
        return self._seconds[Action(kind, self._number, micro_batch)]

    def forward(self, context: Context, *, keep_graph: bool) -> dict[str, torch.Tensor]:
        wait(self._of(kinds.FORWARD, context.micro_batch.index))
        return {} if self.is_last and not self._divides_head else self._message

    def take(self, context: Context) -> None:
        """There is nothing to keep."""

    def give(self, micro_batch: int) -> None:
        """There is nothing to drop."""

    def recompute(self, micro_batch: int) -> None:
        wait(self._of(kinds.RECOMPUTE, micro_batch))

    def backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        start, seconds = time.perf_counter(), self._of(kinds.BACKWARD, micro_batch)
        hidden = torch.zeros(1)
        for i, parameter in enumerate(self.parameters.values()):
            # The last layer's backward comes first.
            done = (len(self.parameters) - i) / len(self.parameters)
            hidden = _Layer.apply(hidden, parameter, start + done * seconds)
        if self.parameters:
            hidden.backward()
        wait_until(start + seconds)
        return {} if self.is_first else self._message

    def input_backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wait(self._of(kinds.INPUT, micro_batch))
        return {} if self.is_first else self._message

    def weight_backward(self, micro_batch: int, completed: Callable[[torch.nn.Parameter], None] | None = None) -> None:
        start, seconds = time.perf_counter(), self._of(kinds.WEIGHT, micro_batch)
        if completed is not None:
            for i, parameter in enumerate(reversed(self.parameters.values())):
                # The last layer's gradient comes first.
                wait_until(start + (i + 1) / len(self.parameters) * seconds)
                completed(parameter)
        wait_until(start + seconds)

    def deferred(self, micro_batch: int) -> set[torch.nn.Parameter]:
        return set(self.parameters.values())

    @property
    def model(self) -> WaitingStage:
        return self

    def defer_weight_gradients(self) -> None:
        """There are none."""

    def _boundary(self, micro_batch: MicroBatch) -> Shapes:
        return self._shapes

    input_shapes = output_shapes = input_gradient_shapes = output_gradient_shapes = _boundary

    def reset(self, *of_step: object) -> None:
        """There is nothing to forget."""

    end_step = reset


class WaitingVisits:
    """The same of `VisitingWeights`: copies that go on beside the stages, one after another in each direction. One copy
    of gradients is under way at a time.

    Args:
        costs: has the seconds of the copies.
        num_buffers: of the process.
    """

    def __init__(self, costs: Costs, num_buffers: int) -> None:
        self._in_seconds, self._out_seconds = (cast(Any, costs.of(kind)[1]) for kind in (LOAD, DROP))
        self._in_free = self._out_free = 0.0
        #: When each buffer is free, in order.
        self._buffers = [0.0] * num_buffers
        self._there: dict[int, float] = {}
        #: The stages that have made gradients in their visit.
        self._adding: set[int] = set()

    def load(self, stage: int) -> None:
        self._in_free = max(self._in_free, self._buffers.pop(0), time.perf_counter()) + self._in_seconds
        self._there[stage] = self._in_free

    def enter(self, stage: int, *, adds_gradients: bool) -> None:
        wait_until(self._there[stage])
        if adds_gradients:
            self._adding.add(stage)

    def drop(self, stage: int) -> None:
        self._buffers.append(time.perf_counter())
        if stage in self._adding:
            wait_until(self._out_free)
            self._out_free = time.perf_counter() + self._out_seconds
            self._adding.remove(stage)
        del self._there[stage]

    def wait_for_host(self) -> Callable[[], None]:
        return partial(wait_until, self._out_free)

    def finish(self) -> None:
        wait_until(self._out_free)

    def reset(self) -> None:
        self._buffers += [0.0] * len(self._there)
        self._there.clear()
        self._adding.clear()


class WaitingHead:
    """The same of `HeadPart`: every message about the head is as large as one between stages."""

    def __init__(self, table: Schedule, seconds: Mapping[Action, float], number: int, boundary: torch.Tensor) -> None:
        self._seconds, self._message, self._number = seconds, boundary, number
        self._last = table.num_stages - 1

    def begin(self, options: object) -> None:
        """There is nothing to note."""

    def take(self, micro_batch: int, outputs: Mapping[str, torch.Tensor]) -> None:
        """There is nothing to keep."""

    def gradient(self, context: Context, parts: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return parts

    def reset(self) -> None:
        """There is nothing to forget."""

    def shapes(self, source: Action, micro_batch: MicroBatch) -> Shapes:
        return {"hidden" if source.stage == self._last else f"of {source.stage}": tuple(self._message.shape)}

    def score(self, context: Context, *, is_training: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        wait(self._seconds[Action(LOGITS, self._number, context.micro_batch.index)])
        return {"hidden" if self._number == self._last else f"of {self._number}": self._message}, {}

    def add_gradient(self, context: Context) -> dict[str, torch.Tensor]:
        wait(self._seconds[Action(LOGITS_GRADIENT, self._number, context.micro_batch.index)])
        return {} if self._number == self._last else {f"of {self._number}": self._message}


class _Layer(torch.autograd.Function):
    """A layer whose backward ends at a given time."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, parameter: torch.Tensor, end: float) -> torch.Tensor:
        ctx.end = end
        return hidden + parameter

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wait_until(ctx.end)
        return gradients[0], gradients[0], None


def wait(seconds: float) -> None:
    """Sleep until so long after now: time spent on going to sleep is part of it."""
    wait_until(time.perf_counter() + seconds)
