"""A stage with a teacher's stage beside it: the teacher runs in F alone, without gradients, and its carry crosses the
same edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.base import Inputs
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.modes.teacher.logits import TeacherLogits
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.runtime.stage import Stage, Tensors

#: The prefix of the names of the teacher's tensors that cross a boundary.
PREFIX = "teacher."


class StageWithTeacher(Stage):
    """A stage, and the stage of the same number of a teacher.

    Args:
        teacher: the teacher's layers, in evaluation mode.
    """

    def __init__(
        self, model: StageModel, wants_gradient: Callable[[int], Mapping[str, bool]], teacher: StageModel
    ) -> None:
        super().__init__(model, wants_gradient)
        self._teacher = teacher

    def forward(self, context: Context, *, keep_graph: bool) -> Tensors:
        context, sent = self._run_teacher(context)
        return super().forward(context, keep_graph=keep_graph) | sent

    def evaluate(self, context: Context) -> Tensors:
        context, sent = self._run_teacher(context)
        return super().evaluate(context) | sent

    def _shapes(self, micro_batch: MicroBatch, *, is_end: bool) -> Shapes:
        boundary = self._teacher.stop if is_end else self._teacher.start
        own = self._teacher.adapter.carry_shapes(boundary, self._inputs(micro_batch.inputs))
        of_student = super()._shapes(micro_batch, is_end=is_end)
        return {**of_student, **{f"{PREFIX}{name}": shape for name, shape in own.items()}}

    @torch.no_grad()
    def _run_teacher(self, context: Context) -> tuple[Context, Tensors]:
        """Run the teacher's stage.

        Returns:
            The context without the teacher's carry, on the last stage with its logits; and the tensors for the next
            stage.

        Raises:
            DataError: a row is longer than the teacher's table of positions.
        """
        own, model = self._inputs(context.micro_batch.inputs), self._teacher
        assert isinstance(model.adapter, TextAdapter)
        model.adapter.check_lengths(own)
        received = {name.removeprefix(PREFIX): t for name, t in context.carry.items() if name.startswith(PREFIX)}
        carry = {name: tensor for name, tensor in context.carry.items() if not name.startswith(PREFIX)}
        deferred = model.deferred_logits() if model.is_last else None
        outputs = model(own, received, deferred=deferred)
        if deferred is None:
            return replace(context, carry=carry), {f"{PREFIX}{name}": tensor for name, tensor in outputs.items()}
        return replace(context, carry=carry, companion=TeacherLogits(deferred, model.division)), {}

    def _inputs(self, inputs: Inputs) -> Inputs:
        """The inputs without labels: the teacher has no loss of its own."""
        return {name: tensor for name, tensor in inputs.items() if name not in self._teacher.adapter.loss_keys}
