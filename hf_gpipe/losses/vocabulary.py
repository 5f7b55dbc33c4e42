"""The cross-entropy of tokens where each rank of a worker, or each stage, has the logits of a part of the vocabulary.

A few numbers for each token take the place of the whole logits (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the
largest logit; the sum of exponentials, the target's logit and the sum of logits. Ranks sum them at once, in
`with_gradient`. Stages send them to the last one (arXiv 2411.05288, section 4): `sums_of_part`, `joined`, and later
`gradient_of_part`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.parts.cuts import VocabularyPart
from hf_gpipe.errors import UserError
from hf_gpipe.losses.token_metrics import TokenMetrics
from hf_gpipe.settings.section import Fraction, Positive, check_value

#: The options of a training -> those of its cross-entropy.
SETTINGS = {"label_smoothing_factor": "label_smoothing", "logit_clipping": "logit_clipping"}


@dataclass(frozen=True)
class TokenOptions:
    """The options of the loss of every target token.

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

    def __post_init__(self) -> None:
        check_value("label_smoothing", self.label_smoothing, Fraction)
        check_value("logit_clipping", self.logit_clipping, Positive | None)
        if self.is_dynamic and self.label_smoothing:
            raise UserError(
                f"label_smoothing={self.label_smoothing!r} has no meaning in the loss of Dynamic Fine-Tuning; leave "
                "one of them out"
            )

    @classmethod
    def from_settings(cls, given: Any, **values: Any) -> Self:
        """The loss with the options that settings of a training have, and other values."""
        return cls(**{own: getattr(given, name) for name, own in SETTINGS.items()}, **values)

    @property
    def given(self) -> dict[str, Any]:
        """The options of the cross-entropy that are not those of the plain one."""
        values = {name: getattr(self, name) for name in ("label_smoothing", "logit_clipping", "is_dynamic")}
        return {name: value for name, value in values.items() if value}

    def unclipped(self) -> Self:
        """The loss without clipping of logits."""
        return self if self.logit_clipping is None else replace(self, logit_clipping=None)

    def seen(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits as the loss sees them, and which of them are clipped; in float32 at least, if any may be."""
        if (bound := self.logit_clipping) is None:
            return logits, None
        wide = logits.to(_wide(logits))
        seen = wide.clamp(-bound, bound)
        return seen, seen != wide

    @staticmethod
    def units(targets: torch.Tensor) -> torch.Tensor:
        """Mask (B, T) of the targets (B, T) that are units of the loss."""
        return targets != IGNORED_LABEL


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
    part: VocabularyPart,
    loss: TokenOptions,
    *,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TokenLoss.with_gradient` of a part of the columns.

    Args:
        logits: (N, V'), of the part, without a graph.
        targets: (N,), tokens of the whole vocabulary.
        part: of the vocabulary.
        loss: whose options count.
        overwrite: whether the gradient may take the memory of the logits.

    Returns:
        The losses (N,), the same on every rank, and the gradient of the part's logits (N, V').
    """
    ranks, is_unit = part.ranks, loss.units(targets)
    columns, is_foreign = _columns(logits, targets, is_unit, part.first)
    seen, is_clipped = loss.seen(logits.to(_wide(logits)))
    own, first = seen.max(-1)
    largest = ranks.largest(own)
    of_target = seen.gather(1, columns).squeeze(1).masked_fill(is_foreign, 0)
    of_all = seen.sum(-1)
    gradient = (seen.sub_(largest[:, None]) if overwrite or seen is not logits else seen - largest[:, None]).exp_()
    sums = ranks.total(torch.stack([gradient.sum(-1), of_target, of_all]))
    gradient.div_(sums[0, :, None])
    losses = losses_of([largest, *sums], part.size, loss.label_smoothing)
    if loss.metrics is not None:
        # The first of the largest logits, as `max` finds it in whole ones.
        first = torch.where(own == largest, first + part.first, part.size)
        is_first = -ranks.largest(-first) == targets
        loss.metrics.add(is_unit, is_first, gradient, ranks.total)
    _less_target(gradient, columns, is_foreign, is_clipped, part.size, loss)
    if loss.is_dynamic:
        probability = losses.neg().exp()
        losses, gradient = losses * probability, gradient.mul_(probability[:, None])
    return losses.masked_fill(~is_unit, 0), gradient


def sums_of_part(
    logits: torch.Tensor, targets: torch.Tensor, first: int, loss: TokenOptions, *, has_metrics: bool
) -> torch.Tensor:
    """The sums that the losses need of a part of the columns, where the other parts follow later (`joined`).

    Args:
        logits: (N, V'), without a graph.
        targets: (N,), tokens of the whole vocabulary.
        first: the token of the first column.
        loss: whose logits are clipped.
        has_metrics: whether the two rows for metrics are there.

    Returns:
        (4, N) or (6, N): the largest logit; the sum of exponentials relative to it; the target's logit, or 0; the sum
        of logits. For metrics the first token with the largest logit, and the sum of logits weighted by exponentials.
    """
    columns, is_foreign = _columns(logits, targets, loss.units(targets), first)
    seen, _ = loss.seen(logits.to(_wide(logits)))
    largest, place = seen.max(-1)
    exponentials = (seen - largest[:, None]).exp_()
    of_target = seen.gather(1, columns).squeeze(1).masked_fill(is_foreign, 0)
    rows = [largest, exponentials.sum(-1), of_target, seen.sum(-1)]
    if has_metrics:
        rows += [(place + first).to(seen), exponentials.mul_(seen).sum(-1)]
    return torch.stack(rows)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums of the whole vocabulary, in the form of those of its parts; they are added in the order of the parts."""
    every = torch.stack(tuple(parts))
    largest = every[:, 0].amax(0)
    shares = (every[:, 0] - largest).exp()
    rows = [largest, (every[:, 1] * shares).sum(0), every[:, 2].sum(0), every[:, 3].sum(0)]
    if every.shape[1] > len(rows):
        firsts = every[:, 4].masked_fill(every[:, 0] < largest, float("inf"))
        rows += [firsts.amin(0), (every[:, 5] * shares).sum(0)]
    return torch.stack(rows)


def losses_of(sums: Sequence[torch.Tensor] | torch.Tensor, size: int, smoothing: float) -> torch.Tensor:
    """The losses (N,) from the first four sums (N,) of the whole vocabulary of V tokens, those of `sums_of_part`."""
    largest, total, of_target, of_all = sums
    return largest + total.log() + (smoothing - 1) * of_target - smoothing * of_all / size


def gradient_of_part(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    size: int,
    largest: torch.Tensor,
    total: torch.Tensor,
    loss: TokenOptions,
) -> torch.Tensor:
    """The gradient of the losses by a part of the columns, (N, V').

    Args:
        logits, targets, first: as of `sums_of_part`.
        size: V.
        largest, total: the first two sums of the whole vocabulary, (N,).
        loss: whose options count.
    """
    columns, is_foreign = _columns(logits, targets, loss.units(targets), first)
    seen, is_clipped = loss.seen(logits.to(_wide(logits)))
    gradient = (seen - largest[:, None]).exp_().div_(total[:, None])
    _less_target(gradient, columns, is_foreign, is_clipped, size, loss)
    return gradient


def _wide(logits: torch.Tensor) -> torch.dtype:
    """The type that they are computed in: float32 at least."""
    return torch.promote_types(logits.dtype, torch.float32)


def _columns(
    logits: torch.Tensor, targets: torch.Tensor, is_unit: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The column (N, 1) of each target, and whether it is in another part, (N,); the column is 0 then."""
    columns = targets.masked_fill(~is_unit, 0) - first
    is_foreign = (columns < 0) | (columns >= logits.shape[1])
    return columns.masked_fill(is_foreign, 0)[:, None], is_foreign


def _less_target(
    probabilities: torch.Tensor,
    columns: torch.Tensor,
    is_foreign: torch.Tensor,
    is_clipped: torch.Tensor | None,
    size: int,
    loss: TokenOptions,
) -> None:
    """Turn the probabilities of a part of the columns into the gradient of the losses, in place."""
    if smoothing := loss.label_smoothing:
        probabilities.sub_(smoothing / size)
    probabilities.scatter_add_(1, columns, (smoothing - 1) * (~is_foreign).to(probabilities)[:, None])
    if is_clipped is not None:
        probabilities.masked_fill_(is_clipped, 0)
