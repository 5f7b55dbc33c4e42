"""The loss of distillation: a student learns the probabilities that a teacher gives to each token.

It is computed some positions at a time, as the cross-entropy is (runtime/head.py): neither model's logits are made
whole. The probabilities are compared as in generalized knowledge distillation (GKD, Agarwal et al. 2024, arXiv
2306.13649, equation 1), with the names of TRL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_gpipe.adapters.parts.cuts import VocabularyPart
from hf_gpipe.errors import UserError
from hf_gpipe.losses import vocabulary as vocabulary_loss
from hf_gpipe.losses.loss import LossInputs, Reads, TokenLoss
from hf_gpipe.recipe import Recipe
from hf_gpipe.settings.losses import DistillationOptions
from hf_gpipe.settings.section import check_value, keys_of, values_in

#: Into how many parts the positions of a slice are cut.
_BLOCKS = 16


@dataclass(frozen=True)
class DistillationLoss(TokenLoss):
    """c * cross-entropy + (1 - c) * divergence of each target token, where c is `cross_entropy_share`.

    With the teacher's probabilities p, the student's q, both of logits divided by the temperature, and their mixture
    m = beta p + (1 - beta) q, the divergence is beta KL(p, m) + (1 - beta) KL(q, m). It is not multiplied by the square
    of the temperature.

    Attributes:
        beta: from 0 to 1. At 0 the divergence is KL(p, q), at 1 KL(q, p), each of which is the limit of what is between
            them divided by beta or 1 - beta.
        temperature: above 0.
        cross_entropy_share: from 0 to 1; the cross-entropy has no temperature.

    Raises:
        UserError: a value that is not allowed, or the logits are clipped, or the loss is dynamic.
    """

    beta: float = DistillationOptions().beta
    temperature: float = DistillationOptions().temperature
    cross_entropy_share: float = DistillationOptions().cross_entropy_share

    reads = Reads.TOKENS | Reads.COMPANION

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, key in keys_of(DistillationOptions).items():
            check_value(name, getattr(self, name), key.allowed)
        if others := self.given.keys() - {"label_smoothing"}:
            raise UserError(f"{' and '.join(sorted(others))} is not supported in distillation; leave it out")
        if self.label_smoothing and not self.cross_entropy_share:
            raise UserError(
                f"label_smoothing={self.label_smoothing!r} is of the cross-entropy, and cross_entropy_share is 0"
            )

    def position_losses(self, read: LossInputs, targets: torch.Tensor) -> torch.Tensor:
        length = targets.shape[1]
        parts = [
            self.with_gradient(logits, own, companion=read.companion.whole(slice(row * length, (row + 1) * length)))[0]
            for row, (logits, own) in enumerate(zip(read.logits, targets, strict=True))
        ]
        return torch.stack(parts)

    @property
    def planned(self) -> TokenLoss:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _Planned(**values | {"metrics": None})

    def with_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        companion: Any = None,
        overwrite: bool = False,
        part: VocabularyPart | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert companion is not None, "its logits are beside the model's"
        dtype = torch.promote_types(logits.dtype, torch.float32)
        gradient = logits if overwrite and logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        losses = logits.new_empty(len(logits), dtype=dtype)
        # A few positions at a time: what is made of their logits on the way takes less memory than a slice.
        size = -(-len(logits) // _BLOCKS)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            losses[rows], gradient[rows] = self._of_block(logits[rows], targets[rows], companion[rows], part)
        return losses, gradient

    def _of_block(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        teacher: torch.Tensor,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, share = torch.promote_types(logits.dtype, torch.float32), self.cross_entropy_share
        student = vocabulary_loss.log_softmax(logits.to(dtype) / self.temperature, part)
        known = vocabulary_loss.log_softmax(teacher.to(dtype) / self.temperature, part)
        losses, gradient = self._divergence(student, known, part)
        gradient.mul_((1 - share) / self.temperature)
        losses = (1 - share) * losses.masked_fill(~self.units(targets), 0)
        if share:
            of_targets, by_logits = TokenLoss.with_gradient(self, logits, targets, part=part)
            losses, gradient = losses + share * of_targets, gradient.add_(by_logits, alpha=share)
        return losses, gradient

    def _divergence(
        self, student: torch.Tensor, teacher: torch.Tensor, part: VocabularyPart | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The divergence of log-probabilities (N, C), (N,), and its gradient by the student's logits, (N, C).

        The memory of the student's may be reused; with a part of the vocabulary the columns are those of the part.
        """
        beta, total = self.beta, vocabulary_loss.total
        if beta == 0:
            losses = total(teacher.exp() * (teacher - student), part)
            return losses, student.exp_().sub_(teacher.exp_())
        reference, weight = teacher, 1.0
        if beta < 1:
            parts = (student + math.log1p(-beta), teacher + math.log(beta))
            reference, weight = torch.logaddexp(*parts), 1 - beta
        # The derivative by the student's probability q is the logarithm of q / m, but for a constant.
        ratio, probability = student - reference, student.exp()
        mean = total(probability * ratio, part)
        losses = weight * mean
        if beta < 1:
            losses = losses + beta * total(teacher.exp() * (teacher - reference), part)
        return losses, ratio.sub_(mean[:, None]).mul_(probability).mul_(weight)


def loss_of(recipe: Recipe) -> DistillationLoss:
    """The loss of a recipe that names a teacher."""
    return DistillationLoss.from_settings(recipe.training, **values_in(recipe.distillation, DistillationOptions))


class _Planned(DistillationLoss):
    """The loss as a plan prices it: without a teacher, with the student's own logits in place of the teacher's."""

    def with_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().with_gradient(logits, targets, **{**options, "companion": logits.clone()})
