"""What GPipe's translation models need beside the pipeline: T(L, H, A), clipped logits, smaller feed-forward layers.

The oracle of clipped logits is the plain model with `logits.clamp` between it and torch's cross-entropy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import MixtralConfig, PreTrainedConfig, PreTrainedModel

from hf_gpipe import Pipeline, PipelineTrainer, transformer_config
from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe import job
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.losses.loss import PLAIN, TokenLoss
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.runtime.device_choice import world_for
from tests.oracle import (
    VOCABULARY,
    Batch,
    Result,
    assert_same,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    tiny_config,
)
from tests.training.toy import arguments

CLIPPING = 0.5


def small(family: str) -> PreTrainedConfig:
    if family == "t5":
        return transformer_config("T(2, 24, 2)", d_model=16, vocab_size=VOCABULARY, d_kv=4, dropout_rate=0.0)
    return tiny_config(family)


def with_large_logits(config: PreTrainedConfig) -> PreTrainedModel:
    """The plain model, with a head of such a size that CLIPPING clips a part of its logits."""
    model = plain_model(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_({"t5": 1, "llama": 4}.get(config.model_type, 10))
    return model


def run_clipped(model: PreTrainedModel, batch: Batch, parts: int, smoothing: float = 0.0) -> tuple[Result, float]:
    """The plain model over the same micro-batches, and the share of its logits that was clipped."""
    model.zero_grad()
    causal = not model.config.is_encoder_decoder
    num_tokens = ((batch["labels"][:, 1:] if causal else batch["labels"]) != -100).sum()
    total, clipped = 0.0, []
    for i in range(parts):
        rows = {name: torch.tensor_split(tensor, parts)[i] for name, tensor in batch.items()}
        logits, labels = model(**rows, use_cache=False).logits, rows["labels"]
        if causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        clipped.append(float((logits.abs() > CLIPPING).double().mean()))
        flat = logits.clamp(-CLIPPING, CLIPPING).reshape(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, labels.reshape(-1), reduction="sum", label_smoothing=smoothing) / num_tokens
        loss.backward()
        total += loss.item()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Result(total, gradients), sum(clipped) / len(clipped)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", ["t5", "marian", "llama"])
def test_clipped_logits_give_the_plain_model_s_loss_and_gradients(family: str, smoothing: float) -> None:
    config = small(family)
    batch, plain = padded_batch(config), with_large_logits(config)
    expected, share = run_clipped(plain, batch, 3, smoothing)
    assert 0.05 < share < 0.95, "some logits are clipped, and some are not"
    plain.zero_grad()
    for num_stages, recompute in ((1, "stage"), (2, "none"), (3, "block"), (3, "stage")):
        pipe = Pipeline(plain, num_stages, 3, recompute=recompute, label_smoothing=smoothing, logit_clipping=CLIPPING)
        assert_same(run_pipeline(pipe, batch), expected)


@pytest.mark.parametrize("schedule", ["gpipe_fused", "1f1b"])
def test_clipped_logits_in_other_schedules(schedule: str) -> None:
    config = small("t5")
    batch, plain = padded_batch(config), with_large_logits(config)
    expected, _ = run_clipped(plain, batch, 3)
    plain.zero_grad()
    pipe = Pipeline(plain, 3, 3, schedule=schedule, logit_clipping=CLIPPING)
    assert_same(run_pipeline(pipe, batch), expected)


def test_evaluation_and_what_is_saved_do_not_clip(tmp_path: Path) -> None:
    config = small("t5")
    batch, plain = padded_batch(config), with_large_logits(config)
    usual, clipping = Pipeline(plain, 2, 2), Pipeline(plain, 2, 2, label_smoothing=0.1, logit_clipping=CLIPPING)
    expected, found = usual.eval_step(batch), clipping.eval_step(batch)
    torch.testing.assert_close(found.row_nll, expected.row_nll, rtol=0, atol=0)
    smoothed = Pipeline(plain, 2, 2, label_smoothing=0.1).eval_step(batch)
    torch.testing.assert_close(found.row_losses, smoothed.row_losses, rtol=0, atol=0)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    assert torch.equal(
        clipping.generate(**ids, max_new_tokens=4, do_sample=False),
        usual.generate(**ids, max_new_tokens=4, do_sample=False),
    )
    clipping.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, plain.eval()(**batch).logits)


def test_under_autocast_logits_are_clipped_in_float32() -> None:
    config = small("t5")
    batch, plain = padded_batch(config), with_large_logits(config).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(**batch, use_cache=False).logits
    flat = logits.float().clamp(-0.3, 0.3).reshape(-1, VOCABULARY)  # bfloat16 has no 0.3
    expected = F.cross_entropy(flat, batch["labels"].reshape(-1))
    pipe = Pipeline(plain, 2, 1, autocast=torch.bfloat16, logit_clipping=0.3)
    assert float(pipe.train_step(batch)) == pytest.approx(expected.item(), abs=1e-6)


def test_the_auxiliary_loss_of_a_mixture_of_experts_is_not_touched() -> None:
    config = MixtralConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "pad_token_id": 0},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.5, "sliding_window": None},
    )
    config._experts_implementation = "eager"
    plain, batch = plain_model(config), padded_batch(config)
    auxiliary = Pipeline(plain, 2, 1).eval_step(batch).auxiliary_loss
    assert auxiliary > 0.1
    clipped, _ = run_clipped(plain, batch, 1)
    plain.zero_grad()
    loss = float(Pipeline(plain, 2, 1, logit_clipping=CLIPPING).train_step(batch))
    assert loss == pytest.approx(clipped.loss + auxiliary, rel=1e-10)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_a_model_by_the_dial_with_smaller_feed_forward_layers_trains_exactly(num_stages: int) -> None:
    config = small("t5")
    arguments: dict[str, Any] = {"seed": 3, "dtype": torch.float64, "depth_scaled_feed_forward": True}
    pipe = Pipeline(config, num_stages, 2, attn_implementation="eager", **arguments)
    plain = plain_model(config)
    usual = Pipeline(config, 1, 2, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in usual.named_parameters():
            is_scaled = name.endswith("DenseReluDense.wo.weight")
            plain.get_parameter(name).copy_(parameter / 2 if is_scaled else parameter)
    batch = padded_batch(config)
    assert_same(run_pipeline(pipe, batch), run_plain(plain, batch, 2))


def test_a_trainer_and_the_pipeline_that_it_is_given_agree_on_clipping(tmp_path: Path) -> None:
    config = small("t5")
    made = PipelineTrainer(config, arguments(tmp_path, num_stages=2, logit_clipping=CLIPPING))
    assert made.pipe.loss == TokenLoss(logit_clipping=CLIPPING)
    pipe = Pipeline(config, 2, 2, logit_clipping=CLIPPING)
    for same in (arguments(tmp_path, num_stages=2), arguments(tmp_path, num_stages=2, logit_clipping=CLIPPING)):
        assert PipelineTrainer(pipe, same).pipe is pipe
    with pytest.raises(UserError, match=r"logit_clipping=1\.0, but the given Pipeline has 0\.5"):
        PipelineTrainer(pipe, arguments(tmp_path, num_stages=2, logit_clipping=1.0))
    with pytest.raises(UserError, match=r"logit_clipping=-1\.0: expected a number above 0 or None"):
        arguments(tmp_path, logit_clipping=-1.0)


def test_a_recipe_asks_for_all_three() -> None:
    recipe = parse_recipe("""\
model:
  transformer: T(3, 24, 2)
  depth_scaled_feed_forward: true
  config: {model_type: t5, d_model: 16, d_kv: 4, vocab_size: 50}
data: {kind: cldr, languages: [de]}
pipeline: {num_stages: 2, num_processes: 1, num_micro_batches: 2, schedule: gpipe, recompute: stage, partition: count}
training: {output_dir: out, logit_clipping: 30}
""")
    config = model_config(recipe, None)
    found = (config.num_layers, config.num_decoder_layers, config.d_ff, config.num_heads, config.d_kv, config.d_model)
    assert found == (3, 3, 24, 2, 4, 16)
    assert not config.is_gated_act
    config.decoder_start_token_id = 0  # a run takes it from the tokenizer
    pipe = job._pipeline(recipe, config, None, world_for(recipe.pipeline))
    assert pipe.loss.logit_clipping == 30.0


def test_a_family_whose_feed_forward_layers_are_not_known_is_refused_before_anything_starts() -> None:
    recipe = parse_recipe("""\
model:
  depth_scaled_feed_forward: true
  config: {model_type: gemma2, num_hidden_layers: 1, hidden_size: 16, intermediate_size: 16, vocab_size: 50}
data: {kind: cldr, languages: [de]}
training: {output_dir: out}
""")
    with pytest.raises(UserError, match="depth_scaled_feed_forward: for the family 'gemma2'"):
        check_model(recipe)


def test_the_memory_estimate_has_the_copy_of_clipped_logits() -> None:
    adapter, workload = adapter_for(tiny_config("llama")), Workload(4, 30, 30)
    losses = (PLAIN, TokenLoss(0.1, 30.0))
    plain, clipping = (LayerTracer(adapter, loss=loss).costs(workload).layers[-1].plain for loss in losses)
    assert clipping.saved_bytes == plain.saved_bytes
    # In float32, in B, where the logits are made.
    copy_bytes = 4 * 4 * 29 * VOCABULARY
    assert copy_bytes <= clipping.backward_working_bytes - plain.backward_working_bytes < 1.1 * copy_bytes
