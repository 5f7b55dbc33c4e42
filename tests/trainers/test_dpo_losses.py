"""The losses of pairs beside the papers' formulas on the plain model: loss and every gradient."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.data import PreferenceCollator, PreferenceExamples
from hf_gpipe.errors import UserError
from hf_gpipe.tasks.dpo import PreferenceLoss
from tests.data.chat_templates import tokenizer
from tests.oracle import plain_model
from tests.trainers.test_dpo import config, rows

BETA = 0.5


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def score(kind: str, ratio: torch.Tensor) -> torch.Tensor:
    """f'(t) of the divergence f for the ratio t of the probabilities, whose logarithm is given."""
    t = torch.exp(ratio)
    if kind == "forward_kl":
        return 1 - 1 / t
    if kind == "js_divergence":
        return torch.log(2 * t / (1 + t))
    return (t ** (0.3 - 1) - 1) / (0.3 - 1) if kind == "alpha_divergence" else ratio


def formula(name: str, c: torch.Tensor, r: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The loss of pairs (N,) from the scores of the chosen and the rejected answers."""
    q = sigmoid(BETA * (c - r))
    if name == "exo_pair":
        return q * torch.log(q / (1 - smoothing)) + (1 - q) * torch.log((1 - q) / smoothing)
    if name == "discopop":
        w = sigmoid(BETA * (c - r) / 0.1)
        return -torch.log(q) * (1 - w) + torch.exp(-BETA * (c - r)) * w
    if name == "bco_pair":
        return -torch.log(sigmoid(BETA * c)) - torch.log(1 - sigmoid(BETA * r))
    return -(1 - smoothing) * torch.log(q) - smoothing * torch.log(1 - q)


def expected_loss(
    model: Any, batch: dict[str, torch.Tensor], reference: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """The loss of a whole mini-batch by the plain model, from the tokens' log-probabilities by the reference (N, T)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    probabilities, labels = logits[:, :-1].softmax(-1), batch["labels"][:, 1:]
    mask = labels != -100
    of_labels = probabilities.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
    tokens = torch.where(mask, torch.log(of_labels), 0.0)
    lengths = mask.sum(1)
    factors = mask.to(tokens)
    for row, alpha in enumerate([options["ld_alpha"]] * len(mask) if "ld_alpha" in options else []):
        places = mask[row].nonzero()[:, 0]
        factors[row, places[min(lengths[row], lengths[row ^ 1]) :]] = alpha
    log_p, log_ref = ((own * factors).sum(1).view(-1, 2) for own in (tokens, reference))
    names, smoothing = options["loss_type"], options.get("label_smoothing", 0.0)
    names = [names] if isinstance(names, str) else names
    weights = torch.ones(len(log_p), dtype=tokens.dtype)
    if options.get("use_weighting"):
        of_squares = torch.log((probabilities**2).sum(-1))
        weights = torch.exp(((tokens - of_squares) * mask).sum(1) / lengths).view(-1, 2).prod(1).detach()
    c, r = score(options.get("f_divergence_type", ""), log_p - log_ref).unbind(1)
    total = torch.zeros(())
    for name, factor in zip(names, options.get("loss_weights", [1.0] * len(names)), strict=True):
        if name == "sft":
            losses = -tokens[::2].sum() / mask[::2].sum()
        elif name == "aot":
            differences = [torch.sort(own[:, 0] - own[:, 1]).values for own in (log_p, log_ref)]
            losses = formula("sigmoid", *differences, smoothing)
        elif name == "aot_unpaired":
            losses = formula("sigmoid", torch.sort(c).values, torch.sort(r).values, smoothing)
        else:
            losses = formula(name, c, r, smoothing)
        total = total + factor * (losses * weights).mean()
    return total


CASES: dict[str, dict[str, Any]] = {
    "several": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
    "aot": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot of vocabulary parts": {"loss_type": ["aot_unpaired", "sft"]},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.01, "f_divergence_type": "js_divergence"},
    "discopop": {"loss_type": "discopop", "discopop_tau": 0.1, "f_divergence_type": "forward_kl"},
    "length": {"loss_type": ["sigmoid"], "ld_alpha": 0.4, "f_divergence_type": "alpha_divergence"},
    "weights": {"loss_type": ["discopop", "bco_pair"], "discopop_tau": 0.1, "use_weighting": True, "ld_alpha": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient(case: str) -> None:
    """A sum of losses, and what reads the whole mini-batch or single tokens, for any K, M and schedule."""
    options, batch = CASES[case], PreferenceCollator(0)(list(PreferenceExamples(rows(5), tokenizer())))
    plain = plain_model(config())
    before = Pipeline(plain_model(config(), seed=3), 2, 2, schedule="vocab_1f1b")
    of_tokens = before.token_log_probs(batch)[:, :-1]
    expected = expected_loss(plain, batch, of_tokens, options)
    expected.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
    is_alpha = options.get("f_divergence_type") == "alpha_divergence"
    loss = PreferenceLoss(BETA, **options, **({"f_alpha_divergence_coef": 0.3} if is_alpha else {}))
    of_rows = loss.reference_of(before.log_probs, batch)
    layouts = [(2, 2, "1f1b", "stage", False), (3, 4, "zb_h1", "none", True)]
    for num_stages, count, schedule, recompute, buckets in (
        [(2, 2, "vocab_1f1b", "none", False)] if case == "aot of vocabulary parts" else layouts
    ):
        pipe = Pipeline(
            copy.deepcopy(plain), num_stages, count, schedule, recompute, loss=loss, length_bucketing=buckets
        )
        pipe.zero_grad()
        given = {**batch, "ref_logps": of_rows}
        assert float(pipe.train_step(given)) == pytest.approx(expected.item(), abs=1e-10)
        for name, parameter in pipe.named_parameters():
            gradient = plain.get_parameter(name).grad
            assert parameter.grad is not None, name
            assert float((parameter.grad - gradient).norm()) <= 1e-10 * norm, name
        assert pipe.eval_step(given).loss == pytest.approx(expected.item(), abs=1e-10)
        with pytest.raises(UserError, match="which reads no embeddings"):
            pipe.embed(given)
