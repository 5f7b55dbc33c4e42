"""SyncBatchNorm over the replicas of a stage: the statistics of the micro-batches that they run side by side.

Each replica notes the statistics of its own micro-batch, and joins the statistics of all replicas in the replicas'
order, so that every replica has the same bits. A recomputed forward finds them kept, and waits for no replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_gpipe.libraries.torch import AnyBatchNorm

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""A replica's tensor -> the tensors of all replicas, in the order of the replicas."""


def normalise(layer: AnyBatchNorm, values: torch.Tensor, statistics: torch.Tensor, gather: Gather) -> torch.Tensor:
    """The layer's output for its replica's values (B, C, ...).

    Args:
        layer: the layer, in training.
        values: what the layer gets of this replica's micro-batch.
        statistics: (3, C) of the micro-batches of all replicas: number of values, mean, sum of squared deviations.
        gather: called in backward, by all replicas in the same order.
    """
    count, mean, squares = statistics
    scale = (squares / count + layer.eps).rsqrt()
    shape = (1, -1, *[1] * (values.dim() - 2))
    normed: torch.Tensor = _Normalised.apply(values, mean.view(shape), scale.view(shape), float(count[0]), gather)
    if layer.weight is not None:
        normed = normed * layer.weight.view(shape)
    normed = normed if layer.bias is None else normed + layer.bias.view(shape)
    return normed.to(values.dtype)  # under autocast the weights are wider


class _Normalised(torch.autograd.Function):
    """(x - mean) * scale, where mean and scale depend on the x of all replicas.

    With y = (x - mean) * scale and N values of each channel, the gradient of x is scale (dy - sum(dy) / N - y sum(dy y)
    / N), whose sums are over the values of all replicas (Ioffe and Szegedy, arXiv 1502.03167, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, count: float, gather: Gather
    ) -> torch.Tensor:
        # In the type of the statistics, so that a large mean costs no digits.
        normed = ((values - mean) * scale).to(values.dtype)
        ctx.save_for_backward(normed, scale)
        ctx.count, ctx.gather = count, gather
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, scale = ctx.saved_tensors
        others = [0, *range(2, gradient.dim())]
        wide = gradient.to(scale.dtype)
        own = torch.stack([wide.sum(others, keepdim=True), (wide * normed).sum(others, keepdim=True)])
        total, product = torch.stack(ctx.gather(own)).sum(0)
        return (scale * (wide - (total + normed * product) / ctx.count)).to(gradient.dtype), None, None, None, None
