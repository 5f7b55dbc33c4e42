"""The loss of GRPO on rollouts with advantages, and the advantages of rewards in groups. Names are those of TRL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError, check_choice, check_number
from hf_gpipe.losses.loss import PLAIN, LogProbs, LossInputs, Reads, TokenLoss
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import GRPOOptions

LEVELS = ("token", "sequence")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


def advantages_of(rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group") -> torch.Tensor:
    """The advantage of each completion, (N,): its reward minus the mean of its group (GRPO, arXiv 2402.03300).

    Args:
        rewards: (N,), where the completions of a prompt are neighbours; NaN of one without a reward, whose advantage
            is 0.
        num_generations: completions of a prompt.
        scale_rewards: by whose standard deviation the differences are divided: of the "group", of the "batch", or
            "none".
    """
    groups = rewards.view(-1, num_generations)
    differences = groups - groups.nanmean(dim=1, keepdim=True)
    if scale_rewards != "none":
        within = groups if scale_rewards == "group" else rewards.view(1, -1)
        differences = differences / (deviations(within) + 1e-4)
    return differences.flatten().nan_to_num(nan=0.0)


def summed(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sums (N,) of rewards (N, F), NaN where all of a row are."""
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)


def advantages_of_each(rewards: torch.Tensor, weights: torch.Tensor, num_generations: int) -> torch.Tensor:
    """The advantages (N,) of rewards (N, F) of several functions, each of which is normalised by itself first.

    They are the weighted sums, normalised over the whole batch (GDPO, arXiv 2601.05242).
    """
    own = torch.stack([advantages_of(reward, num_generations) for reward in rewards.unbind(dim=1)], dim=1)
    total = summed(own.masked_fill(rewards.isnan(), math.nan), weights)
    return ((total - total.nanmean()) / (deviations(total[None])[0] + 1e-4)).nan_to_num(nan=0.0)


def deviations(groups: torch.Tensor) -> torch.Tensor:
    """The standard deviation of each group of rewards (G, N), (G, 1), without those that are NaN; 0 of fewer than 2."""
    counts = (~groups.isnan()).sum(dim=1, keepdim=True)
    squares = (groups - groups.nanmean(dim=1, keepdim=True)).square().nansum(dim=1, keepdim=True)
    return (squares / (counts - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class TemperedLoss(TokenLoss):
    """The negative log-likelihood of logits that are divided by a temperature, as where tokens were sampled so."""

    temperature: float = field(default=1.0, kw_only=True)

    def with_gradient(
        self, logits: torch.Tensor, targets: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses, gradient = super().with_gradient(logits / self.temperature, targets, **options | {"overwrite": True})
        return losses, gradient.div_(self.temperature)


class _Options(GRPOOptions):
    """Those of a recipe, and two more."""

    delta: float | None = None
    """Largest ratio of the term that is not clipped; null: any."""

    importance_sampling_level: str = "token"
    """token, or sequence (GSPO)."""

    def model_post_init(self, context: Any, /) -> None:
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        if self.delta is not None:
            check_number("delta", self.delta, is_above=True)


class GRPOLoss(NotingLoss):
    """The clipped loss of completions with advantages; the inputs have "advantages" (B,), and completions as labels.

    With the ratio r of a token's probability to that at the rollout, and the advantage A of its row, the loss of a
    token is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta k, where k = exp(d) - d - 1 and d is the
    reference's log-probability minus the model's (arXiv 2402.03300, equations 3 and 4).

    Args:
        options: those of `GRPOOptions`, `delta` and `importance_sampling_level`.
        loss_type: "grpo": the mean over a row's tokens, then over rows; "bnpo" and "dapo": the mean over all tokens of
            the step (arXiv 2503.14476); "dr_grpo": the sum over tokens, divided by rows times `max_completion_length`
            (arXiv 2503.20783).
        importance_sampling_level: with "sequence" the ratio of a row is the geometric mean over its tokens (GSPO,
            arXiv 2507.18071).

    The log-probabilities of the reference are "ref_token_logps" (B, T), and those at the rollout "old_logps" (B, T);
    without these the ratio is 1, and has a gradient.
    """

    options = _Options()
    metrics = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    reads, entries = Reads.ROWS, ("advantages", "old_logps", "ref_token_logps")

    @property
    def of_tokens(self) -> TokenLoss:
        temperature = self.options.temperature
        return PLAIN if temperature == 1 else TemperedLoss(temperature=temperature)

    def num_forwards(self, *, has_reference: bool) -> int:
        return int(self.options.beta > 0)

    def with_passes(self, batch: Mapping[str, torch.Tensor], *passes: LogProbs) -> Mapping[str, torch.Tensor]:
        """The mini-batch itself. Raises DataError where it lacks an entry that is read, or has another shape."""
        shape = tuple(batch["labels"].shape)
        for name, expected, is_needed in (
            ("advantages", shape[:1], True),
            ("old_logps", shape, False),
            ("ref_token_logps", shape, bool(self.options.beta)),
        ):
            given = tuple(batch[name].shape) if name in batch else None
            if is_needed if given is None else given != expected:
                raise DataError(
                    f"the entry {name!r} of a mini-batch is {given and list(given)}: the loss reads {list(expected)} "
                    f"beside labels of {list(shape)}; Pipeline.token_log_probs gives log-probabilities of tokens"
                )
        return batch

    def row_tokens(self, targets: torch.Tensor) -> torch.Tensor:
        """The completion's tokens."""
        return TokenLoss.units(targets).sum(dim=1)

    def of_units(self, read: LossInputs) -> torch.Tensor:
        """The loss of each row, (B,), from the losses of its tokens (B, T)."""
        inputs, log_probs = read.inputs, -read.token_losses
        # Labels that follow a position; where there is none, the log-probability is 0.
        mask = torch.zeros_like(log_probs)
        mask[:, :-1] = (inputs["labels"][:, 1:] != IGNORED_LABEL).to(log_probs)
        lengths = mask.sum(dim=1).clamp(min=1)
        advantages = inputs["advantages"].to(log_probs)[:, None]
        old = inputs["old_logps"].to(log_probs) if "old_logps" in inputs else log_probs.detach()
        log_ratio = (log_probs - old) * mask
        if self.options.importance_sampling_level == "sequence":
            log_ratio = (log_ratio.sum(dim=1) / lengths)[:, None].expand_as(mask)
        low, high = self.options.epsilon, self.options.epsilon_high
        ratio, high = log_ratio.exp(), low if high is None else high
        unclipped = ratio if self.options.delta is None else ratio.clamp(max=self.options.delta)
        losses = -torch.min(unclipped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        divergence = torch.zeros_like(mask)
        if self.options.beta:
            difference = (inputs["ref_token_logps"].to(log_probs) - log_probs) * mask
            divergence = difference.exp() - difference - 1
            losses = losses + self.options.beta * divergence
        is_low = (unclipped < 1 - low) & (advantages < 0)
        is_high = (unclipped > 1 + high) & (advantages > 0)
        noted = (divergence, is_low, is_high, is_low | is_high)
        # Means over all tokens: the sums of rows, and their tokens in place of the number of units.
        values, counts = [(column * mask).sum(dim=1) for column in noted], [mask.sum(dim=1)] * len(noted)
        if self.options.importance_sampling_level == "sequence":  # a ratio of each row
            values[1:] = [column[:, 0].to(mask) for column in noted[1:]]
            counts[1:] = [torch.ones_like(counts[0])] * 3
        self._note(*values, counts=counts)
        sums = (losses * mask).sum(dim=1)
        if self.options.loss_type == "grpo":
            return sums / lengths
        if self.options.loss_type == "dr_grpo":
            return sums / self.options.max_completion_length
        return sums * (read.num_units / read.num_tokens)
