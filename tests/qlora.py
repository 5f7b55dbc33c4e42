"""The oracle of LoRA on quantised weights: plain transformers, peft and bitsandbytes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.runtime.cutting import split_rows
from scripts.bench.models import quantisation
from tests.oracle import Result, padded_batch

peft = pytest.importorskip("peft")

LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)

asked = partial(quantisation, compute_dtype="float32")


def config(*, tied: bool = False) -> LlamaConfig:
    """Wide enough for several 4-bit blocks in a row of a weight."""
    return LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )


def plain_model(directory: Path, kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """As transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(
        *(directory,), quantization_config=asked(kind), dtype=dtype, attn_implementation="eager", device_map=device
    )


def expected_step(model: Any, adapters: dict[str, torch.Tensor], num_micro_batches: int = 2) -> Result:
    """A step of transformers and peft with these values of the adapters, the loss computed as the pipeline does."""
    model = peft.get_peft_model(model, copy.deepcopy(LORA)).train()
    named = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == adapters.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(adapters[name])
    batch = {name: tensor.to(model.device) for name, tensor in padded_batch(config()).items()}
    num_tokens, total = int((batch["labels"][:, 1:] != -100).sum()), 0.0
    for rows in split_rows(batch, num_micro_batches):
        used = int(rows["attention_mask"].sum(1).max())  # columns that only pad are cut off
        ids, mask, labels = (rows[name][:, :used] for name in ("input_ids", "attention_mask", "labels"))
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        losses, gradient = TokenLoss().with_gradient(logits.detach().clone().flatten(0, 1), targets, overwrite=True)
        factor = (targets != -100).float().mul_(torch.tensor(1.0) / num_tokens)
        logits.backward((gradient * factor[:, None]).view_as(logits).to(logits.dtype))
        total += float(losses.sum() / num_tokens)
    return Result(total, {name: p.grad.clone() for name, p in named.items()})


def adapters_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The values of the adapters, of all processes."""
    mine = {name: p.detach().clone() for name, p in pipe.named_parameters() if p.requires_grad}
    return {name: tensor for part in pipe.world.gather_objects(mine) for name, tensor in part.items()}


def make(directory: Path, kind: str | None, num_stages: int, **options: Any) -> Pipeline:
    """Stages of the same model with two micro-batches; `kind` is None where the checkpoint is quantised itself."""
    given = None if kind is None else asked(kind)
    return Pipeline(
        directory,
        num_stages,
        num_micro_batches=2,
        quantization_config=given,
        attn_implementation="eager",
        peft_config=LORA,
        **options,
    )
