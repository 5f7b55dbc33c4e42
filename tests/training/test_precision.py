"""Mixed precision: the numbers of the plain model under the same torch.autocast, however it is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import MixtralConfig, OPTConfig, PreTrainedConfig, PreTrainedModel, T5Config

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from tests.gloo import run_gloo
from tests.oracle import (
    VOCABULARY,
    Result,
    assert_same,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    run_scaled,
    tiny_config,
)

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Of the global gradient norm; one rounding to half precision more or less would be 1e-4 and more.
TOLERANCE = 1e-6
FAMILIES = ("llama", "marian", "t5", "opt", "mixtral")


def config_of(family: str) -> PreTrainedConfig:
    """Models whose hidden states are float32 under autocast, and OPT with a narrow embedding, whose are not always."""
    small: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0}
    if family == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
        return T5Config(**small, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    if family == "opt":
        sizes = {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 32, "num_hidden_layers": 3}
        return OPTConfig(**small, **sizes, num_attention_heads=2, dropout=0.0, max_position_embeddings=64)
    if family == "mixtral":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_local_experts": 3}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return MixtralConfig(**small, **sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5)
    return tiny_config(family)


def model_of(family: str) -> PreTrainedModel:
    return plain_model(config_of(family), dtype=torch.float32)


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_the_plain_model_under_autocast(family: str, precision: str) -> None:
    dtype, scale = HALF[precision], 1024.0 if precision == "fp16" else 1.0
    model = model_of(family)
    batch = padded_batch(model.config)
    expected = run_plain(model, batch, 3, dtype, scale)
    with pytest.raises(AssertionError):
        assert_same(run_pipeline(Pipeline(model, 1, 3), batch), expected, TOLERANCE)
    # Each family has every number of stages and every recomputation, and both types and all families every pair.
    for number, num_stages in enumerate((1, 3, len(Pipeline(model, 1).adapter.layers))):
        recompute = ("none", "stage", "block")[(number + FAMILIES.index(family) + (precision == "fp16")) % 3]
        pipe = Pipeline(model, num_stages, 3, recompute=recompute, autocast=dtype)
        assert_same(run_scaled(pipe, batch, scale), expected, TOLERANCE)


#: The head alone is on the second stage: in OPT a linear layer comes right before it.
_WITH_THE_HEAD = {"opt": [5, 1], "mixtral": [5, 1], "marian": [6, 1]}


def _steps_in_processes() -> list[tuple[Result, torch.Tensor]]:
    """OPT's hidden states and Mixtral's router logits are in half precision at some boundaries only."""
    results = []
    for family, precision in (("opt", "bf16"), ("mixtral", "fp16"), ("marian", "bf16")):
        model = model_of(family)
        pipe = Pipeline(model, 2, 3, partition=_WITH_THE_HEAD[family], autocast=HALF[precision])
        batch = padded_batch(model.config)
        prompts = {name: batch[name] for name in ("input_ids", "attention_mask")}
        tokens = pipe.generate(**prompts, max_new_tokens=4, pad_token_id=0)
        results.append((run_scaled(pipe, batch, 1024.0), tokens))
    return results


def test_what_crosses_between_processes_has_the_observed_type() -> None:
    alone = _steps_in_processes()
    for process in run_gloo(_steps_in_processes, 2):
        for (found, tokens), (expected, expected_tokens) in zip(process, alone, strict=True):
            assert_same(found, expected, TOLERANCE)
            assert torch.equal(tokens, expected_tokens)


def test_the_observed_type_differs_from_the_weights() -> None:
    adapter = Pipeline(model_of("mixtral"), 2, autocast=torch.bfloat16).adapter
    assert adapter.carry_dtype(2, "hidden") == torch.float32
    assert adapter.carry_dtype(2, adapter.routers[0].name) == torch.bfloat16
    assert Pipeline(model_of("mixtral"), 2).adapter.carry_dtype(2, adapter.routers[0].name) == torch.float32


def test_evaluation_computes_under_autocast_too() -> None:
    model = model_of("llama")
    batch = padded_batch(model.config)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = model.eval()(**{n: t for n, t in batch.items() if n != "labels"}).logits.float()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    found = Pipeline(model, 2, 3, autocast=torch.bfloat16).eval_step(batch).loss
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_another_type_is_refused() -> None:
    with pytest.raises(UserError, match=r"autocast=torch\.float64"):
        Pipeline(tiny_config("llama"), 2, autocast=torch.float64)
