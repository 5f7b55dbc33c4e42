"""The loss of answers that are wanted or not, each by itself (KTO), and its metrics. Names are those of TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_gpipe.errors import DataError
from hf_gpipe.losses.loss import LogProbs, LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import KTOSection

_MISMATCHED = "KL_"


@dataclass(frozen=True)
class KTOLoss(NotingLoss):
    """The loss of each row, which is desirable or not (Kahneman-Tversky optimization, arXiv 2402.01306, equation 7).

    With the log-ratio r = log p(y|x) - log p_ref(y|x) of a row, the loss of a desirable one is 1 - s(beta (r - z)), and
    that of another one 1 - s(beta (z - r)). The number z, through which no gradient flows, is the mean of r over the
    mini-batch's prompts with answers of other prompts, at least 0: two forwards before the step give it.

    Args:
        beta: how far the model may go from the reference; larger: less far.
        loss_type: "kto", or "apo_zero_unpaired" with z = 0 (arXiv 2408.06266).
        desirable_weight, undesirable_weight: factors of the losses of desirable rows and of the others.

    Raises:
        UserError: a value that is not allowed.
    """

    beta: float = KTOSection().beta
    loss_type: str = KTOSection().loss_type
    desirable_weight: float = KTOSection().desirable_weight
    undesirable_weight: float = KTOSection().undesirable_weight

    metrics = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    reads = Reads.ROWS
    needs_reference, section = True, KTOSection

    @property
    def reads_mismatches(self) -> bool:
        """Whether it reads prompts with answers of other prompts."""
        return self.loss_type == "kto"

    def num_forwards(self, *, has_reference: bool) -> int:
        """Count the forwards of mismatched rows too, by the model and by the reference."""
        mismatched = (1 + has_reference) * self.reads_mismatches
        return super().num_forwards(has_reference=has_reference) + mismatched

    def with_passes(
        self, batch: Mapping[str, torch.Tensor], model: LogProbs, reference: LogProbs
    ) -> Mapping[str, torch.Tensor]:
        """The mini-batch of `KTOCollator`, with "ref_logps" and "kl", the number z of each row, (N,).

        Raises DataError where it has no "desirable", or no mismatched rows and the loss needs them.
        """
        needed = {"desirable", *([f"{_MISMATCHED}labels"] if self.reads_mismatches else [])}
        if missing := needed - batch.keys():
            raise DataError(f"the batch has no {min(missing)!r}, which KTO reads; use KTOCollator")
        passed, desirable = super().with_passes(rows_of(batch), model, reference), batch["desirable"]
        z = torch.zeros((), dtype=torch.float64)
        if self.reads_mismatches:
            rows = mismatched_of(batch)
            before = batch["ref_KL_logps"].cpu() if "ref_KL_logps" in batch else reference(rows)
            z = (model(rows) - before).mean().clamp(min=0)
        return {**passed, "desirable": desirable, "kl": z.expand(len(desirable))}

    def of_units(self, read: LossInputs) -> torch.Tensor:
        """The loss of each row, (B,); the inputs have "ref_logps", "desirable" and "kl", (B,) each."""
        inputs, is_desirable = read.inputs, read.inputs["desirable"]
        ratios = read.log_probs - inputs["ref_logps"].to(read.log_probs)
        z = inputs["kl"].to(ratios)
        rewards = self.beta * ratios.detach()
        among = (*(is_desirable, ~is_desirable) * 2, torch.ones_like(is_desirable))
        values = zip((rewards, rewards, read.log_probs, read.log_probs, z), among, strict=True)
        self._note(*(value * is_counted for value, is_counted in values), counts=among)
        sign = is_desirable.to(ratios) * 2 - 1
        weights = torch.where(is_desirable, self.desirable_weight, self.undesirable_weight).to(ratios)
        return weights * torch.sigmoid(-sign * self.beta * (ratios - z))


def mismatched_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of a mini-batch of which each prompt has the answer of another one."""
    return {name.removeprefix(_MISMATCHED): tensor for name, tensor in batch.items() if name.startswith(_MISMATCHED)}


def rows_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other rows, without what only the loss reads."""
    own = ("desirable", "ref_KL_logps")
    return {name: tensor for name, tensor in batch.items() if not name.startswith(_MISMATCHED) and name not in own}
