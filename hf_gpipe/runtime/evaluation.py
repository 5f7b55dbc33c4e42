"""The loss of a mini-batch in evaluation, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_gpipe.job.world import World
from hf_gpipe.runtime.host import read

#: Results of each row on the last stage, in the order of the fields below.
_NAMES = ("nll", "loss", "num_units")


@dataclass(frozen=True)
class Evaluation:
    """The loss of a mini-batch in evaluation, the same on every process.

    Attributes:
        row_nll: negative log-likelihood summed over each row's target tokens, (N,), natural logarithm.
        row_losses: what each row adds to the loss before the division by the number of units, (N,); labels are smoothed
            as in training, and logits are never clipped.
        row_tokens: number of target tokens of each row, or of units that begin in it, (N,).
        auxiliary_loss: the auxiliary loss of a mixture of experts: its mean over micro-batches, times its coefficient.
            0 for other models.
    """

    row_nll: torch.Tensor
    row_losses: torch.Tensor
    row_tokens: torch.Tensor
    auxiliary_loss: float = 0.0

    @property
    def loss(self) -> float:
        """The mean loss per unit plus the auxiliary loss, as `train_step` returns it without dropout and clipping.

        If there is no unit, it is NaN; `train_step` returns 0 in that case.
        """
        return float(self.row_losses.sum() / self.row_tokens.sum()) + self.auxiliary_loss

    @classmethod
    def gathered(
        cls, outputs: Mapping[int, Mapping[str, torch.Tensor]], row_counts: Sequence[int], world: World
    ) -> Evaluation:
        """Put the results of all processes together, on every process. Every process must call it.

        Args:
            outputs: the result of each micro-batch that this process ran on the last stage, by the number of the
                micro-batch.
            row_counts: the number of rows of each micro-batch of the mini-batch.
        """
        kept = [outputs[index] for index in sorted(outputs)]
        parts = [kept_outputs[name] for name in _NAMES for kept_outputs in kept]
        auxiliary = [kept_outputs["auxiliary_loss"] for kept_outputs in kept if "auxiliary_loss" in kept_outputs]
        values = read([*parts, *auxiliary])
        # The rows of other processes' micro-batches stay 0 here, and the sum over the processes fills them in.
        is_own = torch.cat([torch.full((count,), index in outputs) for index, count in enumerate(row_counts)])
        num_own = int(is_own.sum())
        numbers = torch.zeros(len(_NAMES) * len(is_own) + 1, dtype=torch.float64)
        numbers[:-1].view(len(_NAMES), -1)[:, is_own] = values[: len(_NAMES) * num_own].view(len(_NAMES), num_own)
        numbers[-1] = values[len(_NAMES) * num_own :].sum()
        nll, losses, num_tokens = world.all_reduce(numbers)[:-1].view(len(_NAMES), -1)
        return cls(nll, losses, num_tokens.long(), float(numbers[-1] / len(row_counts)))
