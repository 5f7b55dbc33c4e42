"""The oracle of every exactness test: the plain Hugging Face model, looped over the same micro-batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    M2M100Config,
    MarianConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_gpipe import Pipeline
from hf_gpipe.modes.visits.weights import VisitingWeights

VOCABULARY = 50
Batch = dict[str, torch.Tensor]


@dataclass
class Result:
    """Loss, gradients by name and their global norm."""

    loss: float
    gradients: dict[str, torch.Tensor]

    @property
    def norm(self) -> float:
        return float(torch.sqrt(sum((g.double() ** 2).sum() for g in self.gradients.values())))


def tiny_config(family: str, *, tied: bool = True, dropout: float = 0.0, **overrides: Any) -> PreTrainedConfig:
    """A configuration whose model has a few thousand parameters."""
    if family == "llama":
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=dropout,
            tie_word_embeddings=tied,
            pad_token_id=0,
            **overrides,
        )
    classes = {"marian": MarianConfig, "m2m_100": M2M100Config, "bart": BartConfig}
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": None,
        "tie_word_embeddings": tied,
    }
    return classes[family](**values | overrides)


def plain_model(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The whole model with random weights, eager attention, in training mode."""
    torch.manual_seed(seed)
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
    return model.to(dtype).train()


def padded_batch(config: PreTrainedConfig, rows: int = 6, seed: int = 1) -> Batch:
    """Rows of unequal length, padded on the right; labels are -100 where there is no target."""
    generator = torch.Generator().manual_seed(seed)
    source, target = 4 + rows, 3 + rows
    ids = torch.randint(3, VOCABULARY, (rows, source), generator=generator)
    mask = torch.ones_like(ids)
    labels = torch.randint(3, VOCABULARY, (rows, target), generator=generator)
    for row in range(rows):
        mask[row, source - row :] = 0
        labels[row, target - row :] = -100
    ids = ids.masked_fill(mask == 0, 0)
    if not config.is_encoder_decoder:
        labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run_plain(
    model: PreTrainedModel,
    batch: Batch,
    num_micro_batches: int,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
) -> Result:
    """Loss summed over target tokens, divided by the mini-batch's count, micro-batch after micro-batch.

    Under autocast the forward is in that type, and the loss in float32; its gradients are those of `scale` times it.
    """
    model.zero_grad()
    causal = not model.config.is_encoder_decoder
    shifted = batch["labels"][:, 1:] if causal else batch["labels"]
    num_tokens = (shifted != -100).sum().clamp(min=1)
    parts = min(num_micro_batches, batch["input_ids"].shape[0])
    total = 0.0
    for i in range(parts):
        rows = {name: torch.tensor_split(tensor, parts)[i] for name, tensor in batch.items()}
        with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
            output = model(**rows, use_cache=False)
        logits, labels = output.logits if autocast is None else output.logits.float(), rows["labels"]
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat = logits.reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels.reshape(-1), reduction="sum") / num_tokens
        if (auxiliary := getattr(output, "aux_loss", None)) is not None:
            # Of a mixture of experts: the mean over the micro-batches.
            loss = loss + model.config.router_aux_loss_coef * auxiliary / parts
        (loss * scale).backward()
        total += loss.item()
    return Result(total, {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None})


def run_scaled(pipe: Pipeline, batch: Batch, scale: float) -> Result:
    """One training step with a scaled loss, and its gradients divided by the scale."""
    pipe.loss_scale = scale
    found = run_pipeline(pipe, batch)
    return Result(found.loss, {name: gradient / scale for name, gradient in found.gradients.items()})


def run_pipeline(pipe: Pipeline, batch: Batch | None) -> Result:
    """One training step; the gradients of every process, under their names, on every process."""
    pipe.zero_grad()
    loss = float(pipe.train_step(batch))
    return Result(loss, gathered_gradients(pipe))


def gathered_gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The gradients of every process, under their names, on every process. Replicas must have the same ones."""
    mine = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
    gradients: dict[str, torch.Tensor | None] = {}
    copies: dict[str, int] = {}
    for part in pipe.world.gather_objects(mine):
        for name, gradient in part.items():
            first = gradients.setdefault(name, gradient)
            same = first is gradient if first is None or gradient is None else torch.equal(first, gradient)
            assert same, f"{name}: its replicas have different gradients"
            copies[name] = copies.get(name, 0) + 1
    replicas = {name: pipe.world.placement.replicas[pipe.ties.owner_stage[name]] for name in copies}
    assert copies == replicas, "a parameter has another number of owners than its stage has replicas"
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


def assert_same(found: Result, expected: Result, tolerance: float = 1e-10) -> None:
    """Loss and every gradient within `tolerance` of the global gradient norm, and the same set of parameters."""
    assert abs(found.loss - expected.loss) <= tolerance * max(1.0, abs(expected.loss))
    assert found.gradients.keys() == expected.gradients.keys()
    norm = expected.norm
    assert norm > 0
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).norm()) / norm
        assert error <= tolerance, f"{name}: off by {error:.1e} of the global norm"


def visits_of(pipe: Pipeline) -> dict[int, VisitingWeights]:
    """The visits of the weights of each worker's stages; none where no weights visit."""
    visits: dict[int, VisitingWeights] = pipe.steps.executor.modes["visits"].visits
    return visits
