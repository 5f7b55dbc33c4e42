"""The comparison that decides whether a family is split exactly: a tiny clone, whole and in stages.

In float64, with eager attention, padding and two micro-batches, the loss and every gradient of the stages must be
those of the plain model looped over the same micro-batches, to within 1e-10 of the global gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.base import IGNORED_LABEL
from hf_gpipe.adapters.skeleton import build
from hf_gpipe.adapters.tiny import tiny_config
from hf_gpipe.errors import UnsupportedModelError

TOLERANCE = 1e-10
ROWS, SOURCE_LENGTH, TARGET_LENGTH, MICRO_BATCHES = 4, 9, 7, 2

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step, by parameter name."""

    loss: float
    gradients: dict[str, torch.Tensor]


SplitStep = Callable[[PreTrainedModel, Batch, int], Step]
"""(model in memory, mini-batch, number of micro-batches) -> the step of the same model in stages."""


def exact_clone(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The tiny clone in float64 with random weights and without dropout, in training mode."""
    tiny = tiny_config(config)
    _turn_dropout_off(tiny)
    if hasattr(tiny, "_experts_implementation"):
        tiny._experts_implementation = "eager"  # the grouped products of experts know no float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(tiny, torch.float64, "eager", trust_remote_code=trust_remote_code)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Zeros and ones of a fresh model would hide a bias or a norm that is lost on the way.
                if parameter.requires_grad and not name.endswith("embed_positions.weight"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.tie_weights()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train()


def largest_difference(config: PreTrainedConfig, split: SplitStep, *, trust_remote_code: bool = False) -> float:
    """The largest difference of the loss (relative) or of a gradient (of the global norm).

    Args:
        config: the model's own configuration, of any size.
        split: runs the clone in stages.
        trust_remote_code: whether the configuration may name Python code outside of transformers.

    Raises:
        UnsupportedModelError: the plain clone gives no finite gradient, or the stages give none.
    """
    model = exact_clone(config, trust_remote_code=trust_remote_code)
    batch = padded_batch(model)
    expected = plain_step(model, batch)
    norm = float(torch.sqrt(sum((g.square().sum() for g in expected.gradients.values()), torch.zeros(()))))
    if not norm > 0 or not norm < float("inf"):
        raise UnsupportedModelError(f"{config.model_type}: the plain model's gradient norm is {norm} on a tiny clone")
    model.zero_grad()
    found = split(model, batch, MICRO_BATCHES)
    if found.gradients.keys() != expected.gradients.keys():
        names = sorted(found.gradients.keys() ^ expected.gradients.keys())
        raise UnsupportedModelError(f"{config.model_type}: gradients differ in kind: {', '.join(names[:3])}")
    errors = [float((found.gradients[name] - g).norm()) / norm for name, g in expected.gradients.items()]
    return max([abs(found.loss - expected.loss) / max(1.0, abs(expected.loss)), *errors])


def padded_batch(model: PreTrainedModel) -> Batch:
    """Rows of unequal length, padded on the right."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(3, vocabulary, (ROWS, SOURCE_LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    labels = torch.randint(3, vocabulary, (ROWS, TARGET_LENGTH), generator=generator)
    for row in range(ROWS):
        mask[row, SOURCE_LENGTH - row :] = 0
        labels[row, TARGET_LENGTH - row :] = IGNORED_LABEL
    ids = ids.masked_fill(mask == 0, config.pad_token_id if isinstance(config.pad_token_id, int) else 0)
    if not model.config.is_encoder_decoder:
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def plain_step(model: PreTrainedModel, batch: Batch, prepare: Callable[[Batch], Batch]) -> Step:
    """The plain model looped over the micro-batches; loss summed over target tokens, divided by their number.

    `prepare` is what the stages do to a micro-batch before its forward: cutting columns of padding.
    """
    model.zero_grad()
    causal = not model.config.is_encoder_decoder
    num_tokens = ((batch["labels"][:, 1:] if causal else batch["labels"]) != IGNORED_LABEL).sum()
    total = 0.0
    for i in range(MICRO_BATCHES):
        rows = {name: torch.tensor_split(tensor, MICRO_BATCHES)[i] for name, tensor in batch.items()}
        rows = prepare(rows)
        output = model(**rows, use_cache=False)
        logits, labels = output.logits, rows["labels"]
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum") / num_tokens
        loss.backward()
        total += loss.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(total, gradients)


def _turn_dropout_off(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _turn_dropout_off(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
