"""The losses of pairs of answers, a function each; their names are those of TRL's DPOTrainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from hf_gpipe.settings.losses import PreferenceOptions

#: The losses that read the mean log-probability of an answer's tokens, where others read the sum.
PER_TOKEN = ("ipo", "sigmoid_norm", "simpo", "orpo")
#: TRL's default.
_SIMPO_GAMMA = 0.5
#: The largest power of e, so that the result is finite in float32.
_LARGEST_POWER = 80.0


@dataclass(frozen=True)
class Pairs:
    """N pairs of answers. In each tensor (N, 2) the chosen answer comes first.

    Attributes:
        log_probs: log p(y|x) of the answers.
        reference: log p_ref(y|x); 0 without a reference.
        lengths: tokens of the answers.
        cross_entropy: of the answers; its mean over the pairs of the mini-batch is a mean over tokens.
        options: of the loss.
    """

    log_probs: torch.Tensor
    reference: torch.Tensor
    lengths: torch.Tensor
    cross_entropy: torch.Tensor
    options: PreferenceOptions

    @cached_property
    def ratios(self) -> torch.Tensor:
        """The log-ratios, (N, 2)."""
        return self.log_probs - self.reference

    @cached_property
    def scores(self) -> torch.Tensor:
        """f'(p / p_ref) of the divergence f, (N, 2): of reverse_kl the log-ratios (f-DPO, arXiv 2309.16240)."""
        kind, alpha = self.options.f_divergence_type, self.options.f_alpha_divergence_coef
        if kind == "forward_kl":
            return 1 - torch.exp(-self.ratios)
        if kind == "js_divergence":
            return math.log(2) + F.logsigmoid(self.ratios)
        if kind == "alpha_divergence" and not math.isclose(alpha, 1, abs_tol=1e-6):  # of 1 that of reverse_kl
            return torch.expm1(((alpha - 1) * self.ratios).clamp(max=_LARGEST_POWER)) / (alpha - 1)
        return self.ratios

    def margin(self, per_answer: torch.Tensor) -> torch.Tensor:
        """beta times the difference of the two answers' values, (N,)."""
        return self.options.beta * (per_answer[:, 0] - per_answer[:, 1])

    @property
    def rewards(self) -> tuple[torch.Tensor, ...]:
        """beta times the log-ratios of chosen and of rejected answers, (N,) each."""
        return (self.options.beta * self.ratios).unbind(dim=1)

    def smoothed(self, margin: torch.Tensor, sign: int = 1) -> torch.Tensor:
        """-log s(m), (N,), with `label_smoothing` as the share of the exchanged pair; sign -1 subtracts that."""
        smoothing = self.options.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margin) - sign * smoothing * F.logsigmoid(-margin)


def _sigmoid(pairs: Pairs) -> torch.Tensor:
    return pairs.smoothed(pairs.margin(pairs.scores))


def _robust(pairs: Pairs) -> torch.Tensor:
    return pairs.smoothed(pairs.margin(pairs.scores), sign=-1) / (1 - 2 * pairs.options.label_smoothing)


def _hinge(pairs: Pairs) -> torch.Tensor:
    return torch.relu(1 - pairs.margin(pairs.scores))


def _ipo(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = (pairs.scores / pairs.lengths).unbind(dim=1)
    return (chosen - rejected - 1 / (2 * pairs.options.beta)) ** 2


def _sigmoid_norm(pairs: Pairs) -> torch.Tensor:
    return -F.logsigmoid(pairs.margin(pairs.scores / pairs.lengths))


def _exo_pair(pairs: Pairs) -> torch.Tensor:
    margin, smoothing = pairs.margin(pairs.scores), pairs.options.label_smoothing
    first = torch.sigmoid(margin) * (F.logsigmoid(margin) - math.log1p(-smoothing))
    return first + torch.sigmoid(-margin) * (F.logsigmoid(-margin) - math.log(smoothing))


def _nca_pair(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.rewards
    return -F.logsigmoid(chosen) - (F.logsigmoid(-chosen) + F.logsigmoid(-rejected)) / 2


def _bco_pair(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.rewards
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.rewards
    return ((chosen - 0.5) ** 2 + (rejected + 0.5) ** 2) / pairs.options.beta**2


def _aot(pairs: Pairs) -> torch.Tensor:
    of_model, of_reference = (pairs.margin(own).sort().values for own in (pairs.log_probs, pairs.reference))
    return pairs.smoothed(of_model - of_reference)


def _aot_unpaired(pairs: Pairs) -> torch.Tensor:
    return pairs.smoothed(pairs.margin(pairs.ratios.sort(dim=0).values))


def _apo_zero(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.rewards
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.rewards
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def _discopop(pairs: Pairs) -> torch.Tensor:
    margin = pairs.margin(pairs.scores)
    share = torch.sigmoid(margin / pairs.options.discopop_tau)
    return torch.exp(-margin) * share - F.logsigmoid(margin) * (1 - share)


def _sft(pairs: Pairs) -> torch.Tensor:
    return pairs.cross_entropy[:, 0]


def _with_cross_entropy(losses: torch.Tensor, pairs: Pairs, default: float) -> torch.Tensor:
    given = pairs.options.cpo_alpha
    return losses + (default if given is None else given) * _sft(pairs)


def _cpo(pairs: Pairs) -> torch.Tensor:
    return _with_cross_entropy(pairs.smoothed(pairs.margin(pairs.log_probs)), pairs, 1.0)


def _simpo(pairs: Pairs) -> torch.Tensor:
    gamma = _SIMPO_GAMMA if pairs.options.simpo_gamma is None else pairs.options.simpo_gamma
    losses = pairs.smoothed(pairs.margin(pairs.log_probs / pairs.lengths) - gamma)
    return _with_cross_entropy(losses, pairs, 0.0)


def _orpo(pairs: Pairs) -> torch.Tensor:
    per_token = pairs.log_probs / pairs.lengths
    chosen, rejected = (per_token - torch.log(-torch.expm1(per_token))).unbind(dim=1)  # the logarithms of the odds
    return _with_cross_entropy(-pairs.options.beta * F.logsigmoid(chosen - rejected), pairs, 1.0)


LOSSES: dict[str, Callable[[Pairs], torch.Tensor]] = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "sigmoid_norm": _sigmoid_norm,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
    "cpo": _cpo,
    "simpo": _simpo,
    "orpo": _orpo,
}
"""The loss of each pair, (N,), by its name. The losses of `SORTING` need all pairs of the mini-batch."""
