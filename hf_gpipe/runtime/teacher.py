"""A teacher's stage beside a student's: it runs in F alone, without gradients, and its carry crosses the same edges."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.base import Inputs
from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.adapters.tensor_parallel.head_part import HeadDivision
from hf_gpipe.adapters.tensor_parallel.split import Division
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.runtime.channel import Shapes

#: The prefix of the names of the teacher's tensors that cross a boundary.
PREFIX = "teacher."


class TeacherLogits:
    """The teacher's logits of a micro-batch, made for some positions at a time; between F and B only its last hidden
    states are kept.

    Args:
        deferred: of a forward that has ended.
        division: of the stage that has the head.
    """

    def __init__(self, deferred: DeferredLogits, division: Division | None) -> None:
        self._deferred, self._hidden = deferred, deferred.take_hidden().flatten(0, -2)
        self._division = division

    def whole(self, rows: slice) -> torch.Tensor:
        """The logits of these positions and all tokens, (N, V)."""
        own = self.of(rows)
        return own if self._division is None else self._division.logits(own)

    @torch.no_grad()
    def of(self, rows: slice) -> torch.Tensor:
        """The logits of these positions, (N, V), or of a part of the vocabulary where the head is divided."""
        linear, dtype = self._deferred.projection, self._deferred.autocast_dtype or self._hidden.dtype
        bias = None if linear.bias is None else linear.bias.to(dtype)
        with torch.autocast(self._hidden.device.type, enabled=False):
            projected = F.linear(self._hidden[rows].to(dtype), linear.weight.to(dtype), bias)
        return self._deferred.finish(projected[None])[0]


class StageTeacher:
    """The stage of a teacher.

    Args:
        model: its layers, in evaluation mode.
    """

    def __init__(self, model: StageModel) -> None:
        self._model = model

    def shapes(self, inputs: Inputs, *, is_end: bool) -> Shapes:
        """Names and shapes of the tensors that it sends, at its end, or receives."""
        boundary = self._model.stop if is_end else self._model.start
        shapes = self._model.adapter.carry_shapes(boundary, self._own(inputs))
        return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}

    @torch.no_grad()
    def forward(
        self, inputs: Inputs, carry: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], TeacherLogits | None]:
        """Run the stage.

        Args:
            carry: what the student's stage has received, with the teacher's tensors among it.

        Returns:
            The tensors for the next stage; and on the last stage, which has none, the logits.

        Raises:
            DataError: a row is longer than the teacher's table of positions.
        """
        own, model = self._own(inputs), self._model
        assert isinstance(model.adapter, TextAdapter)
        model.adapter.check_lengths(own)
        received = {name.removeprefix(PREFIX): t for name, t in carry.items() if name.startswith(PREFIX)}
        deferred = model.deferred_logits() if model.is_last else None
        outputs = model(own, received, deferred=deferred)
        if deferred is not None:
            assert not isinstance(model.division, HeadDivision), "a teacher and a divided head do not go together"
            return {}, TeacherLogits(deferred, model.division)
        return {f"{PREFIX}{name}": tensor for name, tensor in outputs.items()}, None

    def _own(self, inputs: Inputs) -> Inputs:
        """Without labels: the teacher has no loss of its own."""
        return {name: tensor for name, tensor in inputs.items() if name not in self._model.adapter.loss_keys}
