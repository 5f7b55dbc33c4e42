"""The loss of GRPO on rollouts with advantages, and the advantages of rewards in groups. Names are those of TRL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError, check_choice, check_number
from hf_gpipe.losses.loss import PLAIN, LogProbs, LossInputs, Reads, TokenLoss
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import CLIPPED, GRPOOptions, ReadBy
from hf_gpipe.settings.section import NotNegative, Positive

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


_VESPO = ReadBy(("vespo",))


class _Options(GRPOOptions):
    """Those of a recipe, and more."""

    delta: Annotated[float | None, ReadBy(CLIPPED)] = None
    """Largest ratio of the term that is not clipped; null: any."""

    importance_sampling_level: Annotated[str, ReadBy((*CLIPPED, "cispo", "sapo"))] = "token"
    """token, or sequence (GSPO): the ratio of a row is the geometric mean over its tokens."""

    sapo_temperature_pos: Annotated[Positive, ReadBy(("sapo",))] = 1.0
    """sapo: how fast the ratio is limited where the advantage is above 0."""

    sapo_temperature_neg: Annotated[Positive, ReadBy(("sapo",))] = 1.05
    """sapo: how fast the ratio is limited where the advantage is not above 0."""

    vespo_k_pos: Annotated[NotNegative, _VESPO] = 2.0
    """vespo: exponent of a row's ratio where the advantage is at least 0."""

    vespo_lambda_pos: Annotated[NotNegative, _VESPO] = 3.0
    """vespo: decay of a row's weight with its ratio where the advantage is at least 0."""

    vespo_k_neg: Annotated[NotNegative, _VESPO] = 3.0
    """vespo: exponent of a row's ratio where the advantage is below 0."""

    vespo_lambda_neg: Annotated[NotNegative, _VESPO] = 2.0
    """vespo: decay of a row's weight with its ratio where the advantage is below 0."""

    off_policy_mask_threshold: Positive | None = None
    """Rows with an advantage below 0 count only if the mean over their tokens of the log-probability at the rollout
    minus the model's is at most this; null: all rows count."""

    use_bias_correction_kl: bool = True
    """Whether the divergence from the reference is multiplied by the ratio of probabilities, through which a gradient
    flows: it is then that of the divergence KL(model, reference) (arXiv 2512.02556)."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy of the tokens' distributions, which is subtracted from the loss. With any other value
    than 0 the logits of a micro-batch are made whole."""

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        check_choice("importance_sampling_level", self.importance_sampling_level, LEVELS)
        if self.delta is not None:
            check_number("delta", self.delta, is_above=True)


class GRPOLoss(NotingLoss):
    """The loss of completions with advantages; the inputs have "advantages" (B,), and completions as labels.

    With the ratio r of a token's probability to that at the rollout, and the advantage A of its row, the loss of a
    token is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta r k, where k = exp(d) - d - 1 and d is the
    reference's log-probability minus the model's (arXiv 2402.03300, equations 3 and 4; the ratio before k is that of
    `use_bias_correction_kl`).

    Args:
        options: those of `GRPOOptions`, and more.
        loss_type: "grpo": the mean over a row's tokens, then over rows; "dapo": the mean over all tokens of the step
            (arXiv 2503.14476); "bnpo": over those of each mini-batch, then over the mini-batches of the step;
            "dr_grpo": the sum over tokens, divided by rows times `max_completion_length` (arXiv 2503.20783); "luspo":
            the sum over a row's tokens, then the mean over rows (arXiv 2602.05261).
            In place of the minimum, "cispo" has min(r, epsilon_high) A log p, where no gradient flows through the ratio
            (arXiv 2506.13585), "sapo" has 4 s(t (r - 1)) A / t with a temperature t (arXiv 2511.20347), and "vespo" has
            w A log p with w = R ** k exp(l (1 - R)), R the ratio of the whole row, and no gradient through w (arXiv
            2602.10693).
        importance_sampling_level: with "sequence" the ratio of a row is the geometric mean over its tokens (GSPO,
            arXiv 2507.18071).
        off_policy_mask_threshold: as in DeepSeek-V3.2 (arXiv 2512.02556).

    The log-probabilities of the reference are "ref_token_logps" (B, T), and those at the rollout "old_logps" (B, T);
    without these the ratio is 1, and has a gradient. Of "bnpo", "num_tokens" (B,) has the number by which the sum of a
    row is divided, where it is not that of the tokens of the step.
    """

    options = _Options()
    metrics = (
        *("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
        *("cispo_clip_ratio", "vespo/phi_seq_mean", "policy_loss", "entropy"),
    )
    reads, entries = Reads.ROWS, ("advantages", "old_logps", "ref_token_logps", "num_tokens")

    def __init__(self, *options: Any, **by_name: Any) -> None:
        super().__init__(*options, **by_name)
        self.reads = Reads.ROWS | Reads.LOGITS if self.options.entropy_coef else Reads.ROWS

    @property
    def token_loss(self) -> TokenLoss:
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
            ("num_tokens", shape[:1], False),
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

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each row, (B,), from the losses of its tokens (B, T), and perhaps the logits (B, T, V)."""
        given, inputs, log_probs = self.options, read.inputs, -read.token_losses
        # Labels that follow a position; where there is none, the log-probability is 0.
        mask = torch.zeros_like(log_probs)
        mask[:, :-1] = (inputs["labels"][:, 1:] != IGNORED_LABEL).to(log_probs)
        lengths = mask.sum(dim=1).clamp(min=1)
        advantages = inputs["advantages"].to(log_probs)[:, None]
        old = inputs["old_logps"].to(log_probs) if "old_logps" in inputs else log_probs.detach()
        log_ratio = (log_probs - old) * mask
        of_ratio = log_ratio
        if given.importance_sampling_level == "sequence":
            of_ratio = (log_ratio.sum(dim=1) / lengths)[:, None].expand_as(mask)
        ratio = of_ratio.exp()
        losses, noted = self._by_type(ratio, log_ratio, log_probs, advantages, mask)
        if given.off_policy_mask_threshold is not None:
            drift = -log_ratio.detach().sum(dim=1, keepdim=True) / lengths[:, None]
            losses = losses * ((advantages >= 0) | (drift <= given.off_policy_mask_threshold))
        if given.beta:
            difference = (inputs["ref_token_logps"].to(log_probs) - log_probs) * mask
            divergence = difference.exp() - difference - 1
            if given.use_bias_correction_kl:
                divergence = divergence * ratio
            losses = losses + given.beta * divergence
            noted["kl"] = (divergence * mask).sum(dim=1), mask.sum(dim=1)
        of_rows = self._averaged(losses, mask, lengths, read)
        if given.entropy_coef:
            noted["policy_loss"] = of_rows, torch.ones_like(of_rows)
            entropies = (_entropies(read.logits / given.temperature).to(mask) * mask).sum(dim=1)
            noted["entropy"] = entropies, mask.sum(dim=1)
            of_rows = of_rows - given.entropy_coef * entropies * (read.num_units / read.num_tokens)
        nothing = (torch.zeros_like(of_rows),) * 2
        values, counts = zip(*(noted.get(name, nothing) for name in self.metrics), strict=True)
        self._note(*values, counts=counts)
        return of_rows

    def _by_type(
        self,
        ratio: torch.Tensor,
        log_ratio: torch.Tensor,
        log_probs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """The loss of each token, (B, T), by the type of the loss, and the sums and counts of metrics of rows, (B,).

        Args:
            ratio: (B, T), of the token, or that of its row.
            log_ratio, log_probs: (B, T).
            advantages: (B, 1).
            mask: (B, T), 1 where there is a token.
        """
        given = self.options
        low, high = given.epsilon, given.epsilon if given.epsilon_high is None else given.epsilon_high
        counts = torch.ones_like(mask[:, 0])
        if given.loss_type == "sapo":
            speed = torch.where(advantages > 0, given.sapo_temperature_pos, given.sapo_temperature_neg).to(ratio)
            return -torch.sigmoid(speed * (ratio - 1)) * 4 / speed * advantages, {}
        if given.loss_type == "vespo":
            of_rows = self._weights_of_rows(log_ratio.detach(), advantages)
            return -of_rows * advantages * log_probs, {"vespo/phi_seq_mean": (of_rows[:, 0], counts)}
        if given.loss_type == "cispo":
            losses = -ratio.clamp(max=high).detach() * advantages * log_probs
            flags = {"cispo_clip_ratio": (ratio > high) & (advantages > 0)}
        else:
            unclipped = ratio if given.delta is None else ratio.clamp(max=given.delta)
            losses = -torch.min(unclipped * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
            is_low, is_high = (unclipped < 1 - low) & (advantages < 0), (unclipped > 1 + high) & (advantages > 0)
            flags = {"low": is_low, "high": is_high, "region": is_low | is_high}
            flags = {f"clip_ratio/{name}_mean": own for name, own in flags.items()}
        if given.importance_sampling_level == "sequence":  # a ratio of each row
            return losses, {name: (own[:, 0].to(mask), counts) for name, own in flags.items()}
        return losses, {name: ((own * mask).sum(dim=1), mask.sum(dim=1)) for name, own in flags.items()}

    def _weights_of_rows(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """The weight of each row, (B, 1), from log-ratios of tokens (B, T), 0 where there is none, by vespo."""
        given = self.options
        is_good = advantages >= 0
        exponent = torch.where(is_good, given.vespo_k_pos, given.vespo_k_neg).to(log_ratio)
        decay = torch.where(is_good, given.vespo_lambda_pos, given.vespo_lambda_neg).to(log_ratio).clamp(min=1e-4)
        # Of one token and of a row at most e ** 20, and of a row at least 1e-8, as in TRL.
        of_row = log_ratio.clamp(-20, 20).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20)
        return (decay + exponent * of_row - decay * of_row.exp()).exp()

    def _averaged(
        self, losses: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, read: LossInputs
    ) -> torch.Tensor:
        """The loss of each row, (B,), whose mean over the rows of the step is the loss, from those of tokens (B, T)."""
        sums = (losses * mask).sum(dim=1)
        if self.options.loss_type in ("grpo", "sapo"):
            return sums / lengths
        if self.options.loss_type == "luspo":
            return sums
        if self.options.loss_type == "dr_grpo":
            return sums / self.options.max_completion_length
        if self.options.loss_type == "bnpo" and "num_tokens" in read.inputs:
            return sums * read.num_units / read.inputs["num_tokens"].to(sums)
        return sums * (read.num_units / read.num_tokens)


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of the distribution of each position, (B, T), of logits (B, T, V), in float32 at least."""
    log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs).sum(dim=-1)
