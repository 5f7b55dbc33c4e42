"""The loss: cross-entropy of every target token, in little memory.

A loss is a sum over units and their number, which is known from the targets alone, before any forward: each micro-batch
adds its sum, divided by the number of units of the whole mini-batch. The units of this loss are target tokens; other
losses are in runtime/custom_loss.py.

At a large vocabulary the loss is the peak of the last stage's memory.
`torch.nn.functional.cross_entropy` keeps the logarithms of all probabilities for backward and makes two more tensors of
that size there. Here forward turns the probabilities into the gradient in place, and backward scales it in place. Where
the logits can be made in parts, training never has all of them (runtime/head.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import UserError
from hf_gpipe.runtime.token_metrics import TokenMetrics


@dataclass(frozen=True)
class TokenLoss:
    """The loss of every target token.

    Attributes:
        label_smoothing: share of the target's probability that is spread over the vocabulary, as in
            torch.nn.functional.cross_entropy.
        logit_clipping: the largest magnitude of a logit that the loss sees, as by `logits.clamp(-c, c)` (GPipe,
            arXiv 1811.06965, section 5); a logit beyond it gets no gradient. None: no clipping.
        is_dynamic: whether the loss of each token is multiplied by its probability, through which no gradient flows
            (Dynamic Fine-Tuning, arXiv 2508.05629).
        metrics: where other metrics of the tokens are noted; None: nowhere.

    Raises:
        UserError: `label_smoothing` is not in [0, 1), or is given for the dynamic loss, or `logit_clipping` is not a
            finite number above 0.
    """

    label_smoothing: float = 0.0
    logit_clipping: float | None = None
    is_dynamic: bool = False
    metrics: TokenMetrics | None = field(default=None, compare=False, repr=False)

    #: Rows of a mini-batch that must stay in one micro-batch.
    rows_per_unit = 1

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing={self.label_smoothing!r}: expected at least 0 and below 1")
        if self.is_dynamic and self.label_smoothing:
            raise UserError(
                f"label_smoothing={self.label_smoothing!r} has no meaning in the loss of Dynamic Fine-Tuning; leave "
                "one of them out"
            )
        bound = self.logit_clipping
        if bound is not None and (isinstance(bound, bool) or not (bound > 0 and math.isfinite(bound))):
            raise UserError(f"logit_clipping={bound!r}: expected a finite number above 0, or None for no clipping")

    @staticmethod
    def units(targets: torch.Tensor) -> torch.Tensor:
        """Mask (B, T) of the targets (B, T) that are units of the loss."""
        return targets != IGNORED_LABEL

    @staticmethod
    def row_units(targets: torch.Tensor) -> torch.Tensor:
        """The number of units in each row of targets (B, T), (B,)."""
        return TokenLoss.units(targets).sum(dim=1)

    @property
    def planned(self) -> TokenLoss:
        """The loss that the planner traces, whose tensors have no values."""
        return replace(self, metrics=None)

    @property
    def unclipped(self) -> TokenLoss:
        """The same loss without clipping, for evaluation: the saved model does not clip its logits."""
        return replace(self, logit_clipping=None, metrics=None)

    def noting(self, mini_batch: tuple[int, int], *, is_training: bool) -> TokenLoss:
        """The same loss, which notes its metrics as those of a mini-batch."""
        if self.metrics is None:
            return self
        return replace(self, metrics=self.metrics.of(mini_batch, is_training=is_training))

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every position, 0 where the target is ignored; half precision is raised to float32.

        Args:
            logits: (B, T, V).
            targets: (B, T).

        Returns:
            (B * T,). Its backward can run once.
        """
        flat, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        if flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()
        losses: torch.Tensor = _CrossEntropy.apply(flat, targets, self)
        return losses

    def with_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, *, overwrite: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of every position and its gradient, in float32 at least.

        Args:
            logits: (N, V), without a graph.
            targets: (N,).
            overwrite: whether the gradient may take the memory of the logits.

        Returns:
            (N,), 0 where the target is ignored; and (N, V), which has no meaning where the target is ignored.
        """
        smoothing, bound = self.label_smoothing, self.logit_clipping
        is_ignored = ~self.units(targets)
        columns = targets.masked_fill(is_ignored, 0)[:, None]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        seen, is_clipped = logits, None
        if bound is not None:
            unclipped = logits.to(dtype)
            seen = unclipped.clamp(-bound, bound)
            is_clipped = seen != unclipped
        if self.metrics is None:
            largest = seen.amax(-1, keepdim=True).to(dtype)
        else:
            largest, first = seen.max(-1, keepdim=True)
            largest = largest.to(dtype)
        losses = (smoothing - 1) * seen.gather(1, columns).to(dtype)
        if smoothing:
            losses -= smoothing * seen.mean(-1, keepdim=True, dtype=dtype)
        wide = seen.to(dtype)
        if overwrite or wide is not logits:
            # In its memory, which nothing else reads.
            gradient = wide.sub_(largest).exp_()
            gradient.div_(gradient.sum(-1, keepdim=True))
        else:
            gradient = torch.softmax(wide, dim=-1)
        # The logarithm of the sum of exponentials, from the largest logit, whose probability never underflows.
        losses += largest - gradient.amax(-1, keepdim=True).log()
        if self.metrics is not None:
            self.metrics.add(~is_ignored, (first == columns).squeeze(1), gradient)
        if smoothing:
            gradient.sub_(smoothing / gradient.shape[1])
        gradient.scatter_add_(1, columns, torch.full_like(losses, smoothing - 1))
        if is_clipped is not None:
            gradient.masked_fill_(is_clipped, 0)
        if self.is_dynamic:
            probability = losses.neg().exp()
            losses, gradient = losses * probability, gradient.mul_(probability)
        return losses.squeeze(1).masked_fill(is_ignored, 0), gradient


PLAIN = TokenLoss()
"""Without smoothing or clipping: the negative log-likelihood."""


class _CrossEntropy(torch.autograd.Function):
    """Losses (N,) of logits (N, V) and targets (N,); its backward can run once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, loss: TokenLoss) -> torch.Tensor:
        losses, gradient = loss.with_gradient(logits, targets)
        ctx.save_for_backward(gradient, loss.units(targets))
        return losses

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient, is_unit = ctx.saved_tensors
        # In place: nothing else reads it, and it is as large as the logits.
        return gradient.mul_(outer.masked_fill(~is_unit, 0)[:, None]), None, None
