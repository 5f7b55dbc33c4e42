"""The logits of a teacher, which a loss reads beside those of the model."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.division import StageDivision
from hf_gpipe.adapters.modules.head import DeferredLogits


class TeacherLogits:
    """The teacher's logits of a micro-batch, made for some positions at a time; between F and B only its last hidden
    states are kept.

    Args:
        deferred: of a forward that has ended.
        division: of the stage that has the head.
    """

    def __init__(self, deferred: DeferredLogits, division: StageDivision) -> None:
        self._deferred, self._hidden = deferred, deferred.take_hidden().flatten(0, -2)
        self._division = division

    def whole(self, rows: slice) -> torch.Tensor:
        """The logits of these positions and all tokens, (N, V)."""
        return self._division.logits(self.of(rows))

    @torch.no_grad()
    def of(self, rows: slice) -> torch.Tensor:
        """The logits of these positions, (N, V), or of a part of the vocabulary where the head is divided."""
        linear, dtype = self._deferred.projection, self._deferred.autocast_dtype or self._hidden.dtype
        bias = None if linear.bias is None else linear.bias.to(dtype)
        with torch.autocast(self._hidden.device.type, enabled=False):
            projected = F.linear(self._hidden[rows].to(dtype), linear.weight.to(dtype), bias)
        return self._deferred.finish(projected[None])[0]
