"""The loss of a reward model: the Bradley-Terry model of pairs of answers, and its metrics. Names are those of TRL."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from hf_gpipe.losses.loss import LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import RewardsSection


@dataclass(frozen=True)
class RewardLoss(NotingLoss):
    """-log s(r(chosen) - r(rejected) - m) of each pair, where r is the only logit of a row and m the pair's margin.

    The margin is the label of the chosen row (Bradley-Terry, as in InstructGPT, arXiv 2203.02155, equation 1, and with
    a margin in Llama 2, arXiv 2307.09288, equation 2).

    Args:
        center_rewards_coefficient: factor of (r(chosen) + r(rejected)) ** 2, which is added so that rewards have a mean
            near 0 (arXiv 2312.09244, appendix A); None: 0.

    Raises:
        UserError: it is below 0, or not finite.
    """

    center_rewards_coefficient: float | None = None

    metrics = ("accuracy", "margin", "mean_reward")
    reads = Reads.LOGITS
    rows_per_unit, section = 2, RewardsSection
    #: As in TRL, the loss is a function of the rewards alone.
    adds_auxiliary = False

    def of_units(self, read: LossInputs) -> torch.Tensor:
        """The loss of each pair, (B / 2,), from logits (B, 1) and labels (B,)."""
        logits = read.logits.to(torch.promote_types(read.logits.dtype, torch.float32))
        chosen, rejected = logits.view(-1, 2).unbind(dim=1)
        self._note((chosen > rejected).double(), chosen - rejected, (chosen + rejected) / 2)
        margin = read.inputs["labels"].view(-1, 2)[:, 0].to(chosen)
        losses = -F.logsigmoid(chosen - rejected - margin)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * (chosen + rejected) ** 2
        return losses
