"""Cross-entropy of every target token in little memory: at a large vocabulary it is the peak of the last stage.

`torch.nn.functional.cross_entropy` keeps the logarithms of all probabilities for backward and makes two more tensors of
that size there. Here the probabilities are kept, and backward turns them into the gradient where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL


def token_losses(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """The loss of every position, 0 where the target is ignored; half precision is raised to float32.

    Args:
        logits: (B, T, V).
        targets: (B, T).
        label_smoothing: share of the target's probability spread over the vocabulary, as in
            torch.nn.functional.cross_entropy.

    Returns:
        (B * T,).
    """
    flat, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    if label_smoothing:
        return F.cross_entropy(
            flat, targets, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=label_smoothing
        )
    losses: torch.Tensor = _CrossEntropy.apply(flat, targets)
    return losses


class _CrossEntropy(torch.autograd.Function):
    """-log p(target) of logits (N, V) and targets (N,); its backward can run once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        is_ignored = targets == IGNORED_LABEL
        columns = targets.masked_fill(is_ignored, 0)[:, None]
        probabilities = torch.softmax(logits, dim=-1)
        # The logarithm of the sum of exponentials, from the largest logit, whose probability never underflows.
        log_sum = logits.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()
        ctx.save_for_backward(probabilities, columns, is_ignored)
        return (log_sum - logits.gather(1, columns)).squeeze(1).masked_fill(is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        probabilities, columns, is_ignored = ctx.saved_tensors
        weights = gradient.masked_fill(is_ignored, 0)[:, None]
        # In place: nothing else reads the probabilities, and there are as many as logits.
        return probabilities.mul_(weights).scatter_add_(1, columns, -weights), None
