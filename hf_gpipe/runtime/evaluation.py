"""The loss of a mini-batch in evaluation, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_gpipe.runtime.host import read


@dataclass(frozen=True)
class Evaluation:
    """The loss of a mini-batch in evaluation, the same on every process.

    Attributes:
        row_nll: negative log-likelihood summed over each row's target tokens, (N,), natural logarithm.
        row_losses: the same with labels smoothed as in training, (N,); logits are never clipped here.
        row_tokens: number of target tokens of each row, (N,).
        auxiliary_loss: of a mixture of experts, the mean over micro-batches, times its coefficient; else 0.
    """

    row_nll: torch.Tensor
    row_losses: torch.Tensor
    row_tokens: torch.Tensor
    auxiliary_loss: float = 0.0

    @property
    def loss(self) -> float:
        """Mean loss per target token plus auxiliary loss, as `train_step` returns without dropout and clipping."""
        return float(self.row_losses.sum() / self.row_tokens.sum().clamp(min=1)) + self.auxiliary_loss

    @staticmethod
    def numbers(outputs: Mapping[int, Mapping[str, torch.Tensor]], num_rows: int) -> torch.Tensor:
        """Pack the results of the last stage into one tensor, which can be sent to the other processes.

        Args:
            outputs: of each micro-batch of the mini-batch on the last stage; empty in the other processes.
            num_rows: of the mini-batch.
        """
        if not outputs:
            return torch.zeros(3 * num_rows + 1, dtype=torch.float64)
        kept = [outputs[index] for index in range(len(outputs))]
        names = ("nll", "loss", "num_units")
        parts = [one[name] for name in names for one in kept]
        auxiliary = [one["auxiliary_loss"] for one in kept if "auxiliary_loss" in one]
        numbers = read([*parts, *auxiliary])
        mean = numbers[3 * num_rows :].sum() / len(kept)
        return torch.cat([numbers[: 3 * num_rows], mean[None]])

    @classmethod
    def from_numbers(cls, numbers: torch.Tensor) -> Evaluation:
        """Unpack a tensor that `numbers` made."""
        nll, losses, num_tokens = numbers[:-1].view(3, -1)
        return cls(nll, losses, num_tokens.long(), float(numbers[-1]))
