"""The cross-entropy of tokens where each rank of a worker has the logits of a part of the vocabulary.

Two messages of a number or three for each token take the place of the whole logits (Shoeybi et al. 2019,
arXiv 1909.08053, section 3): the largest logit; and the sum of exponentials, the target's logit and the sum of logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_gpipe.adapters.tensor_parallel.vocabulary import VocabularyPart

if TYPE_CHECKING:
    from hf_gpipe.runtime.loss import TokenLoss


def with_gradient(
    loss: TokenLoss, logits: torch.Tensor, targets: torch.Tensor, part: VocabularyPart, *, overwrite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TokenLoss.with_gradient` of a part of the columns.

    Args:
        loss: of tokens.
        logits: (N, V'), of the part, without a graph.
        targets: (N,), tokens of the whole vocabulary.
        part: of the vocabulary.
        overwrite: whether the gradient may take the memory of the logits.

    Returns:
        The losses (N,), the same on every rank, and the gradient of the part's logits (N, V').
    """
    smoothing, bound, ranks = loss.label_smoothing, loss.logit_clipping, part.ranks
    is_ignored = ~loss.units(targets)
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
    total, of_target, of_all = ranks.total(torch.stack([gradient.sum(-1), of_target, of_all]))
    gradient.div_(total[:, None])
    losses = largest + total.log() + (smoothing - 1) * of_target - smoothing * of_all / part.size
    if loss.metrics is not None:
        # The first of the largest logits, as `max` finds it in whole ones.
        first = torch.where(own == largest, first + part.first, part.size)
        is_first = -ranks.largest(-first) == targets
        loss.metrics.add(~is_ignored, is_first, gradient, ranks.total)
    if smoothing:
        gradient.sub_(smoothing / part.size)
    gradient.scatter_add_(1, columns, (smoothing - 1) * (~is_foreign).to(gradient)[:, None])
    if is_clipped is not None:
        gradient.masked_fill_(is_clipped, 0)
    if loss.is_dynamic:
        probability = losses.neg().exp()
        losses, gradient = losses * probability, gradient.mul_(probability[:, None])
    return losses.masked_fill(is_ignored, 0), gradient
