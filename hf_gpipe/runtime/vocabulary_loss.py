"""The cross-entropy of tokens where each rank of a worker has the logits of a part of the vocabulary.

Two messages of a number or three for each token take the place of the whole logits (Shoeybi et al. 2019,
arXiv 1909.08053, section 3): the largest logit; and the sum of exponentials, the target's logit and the sum of logits.
"""

from __future__ import annotations

import torch

from hf_gpipe.adapters.tensor_parallel.vocabulary import VocabularyPart
from hf_gpipe.runtime.token_metrics import TokenMetrics


def log_softmax(logits: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """The logarithms of the probabilities (N, V') of the tokens of a part, or of all."""
    if part is None:
        return torch.log_softmax(logits, dim=-1)
    shifted = logits - part.ranks.largest(logits.amax(-1))[:, None]
    return shifted.sub_(part.ranks.total(shifted.exp().sum(-1)).log_()[:, None])


def total(values: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """The sums (N,) over all tokens of values (N, V') of a part, or of all."""
    own = values.sum(-1)
    return own if part is None else part.ranks.total(own)


def with_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    is_unit: torch.Tensor,
    part: VocabularyPart,
    *,
    smoothing: float,
    bound: float | None,
    is_dynamic: bool,
    metrics: TokenMetrics | None,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TokenLoss.with_gradient` of a part of the columns.

    Args:
        logits: (N, V'), of the part, without a graph.
        targets: (N,), tokens of the whole vocabulary.
        is_unit: which of them are targets, (N,).
        part: of the vocabulary.
        smoothing, bound, is_dynamic, metrics: `label_smoothing`, `logit_clipping` and so on of the loss.
        overwrite: whether the gradient may take the memory of the logits.

    Returns:
        The losses (N,), the same on every rank, and the gradient of the part's logits (N, V').
    """
    ranks, is_ignored = part.ranks, ~is_unit
    columns = targets.masked_fill(is_ignored, 0) - part.first
    is_foreign = (columns < 0) | (columns >= logits.shape[1])
    columns = columns.masked_fill(is_foreign, 0)[:, None]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    seen = wide if bound is None else wide.clamp(-bound, bound)
    is_clipped = None if bound is None else seen != wide
    own, first = seen.max(-1)
    largest = ranks.largest(own)
    of_target = seen.gather(1, columns).squeeze(1).masked_fill(is_foreign, 0)
    of_all = seen.sum(-1)
    gradient = (seen.sub_(largest[:, None]) if overwrite or seen is not logits else seen - largest[:, None]).exp_()
    sums, of_target, of_all = ranks.total(torch.stack([gradient.sum(-1), of_target, of_all]))
    gradient.div_(sums[:, None])
    losses = largest + sums.log() + (smoothing - 1) * of_target - smoothing * of_all / part.size
    if metrics is not None:
        # The first of the largest logits, as `max` finds it in whole ones.
        first = torch.where(own == largest, first + part.first, part.size)
        is_first = -ranks.largest(-first) == targets
        metrics.add(is_unit, is_first, gradient, ranks.total)
    if smoothing:
        gradient.sub_(smoothing / part.size)
    gradient.scatter_add_(1, columns, (smoothing - 1) * (~is_foreign).to(gradient)[:, None])
    if is_clipped is not None:
        gradient.masked_fill_(is_clipped, 0)
    if is_dynamic:
        probability = losses.neg().exp()
        losses, gradient = losses * probability, gradient.mul_(probability[:, None])
    return losses.masked_fill(is_ignored, 0), gradient
