"""Losses of deferred logits, some positions at a time: those of plain Hugging Face, and never all logits at once."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    T5Config,
)

from hf_gpipe import LogitsLoss, Pipeline, RowLoss
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules.head import DeferredLogits, Projection
from hf_gpipe.adapters.observation.probe import observe
from hf_gpipe.losses.loss import LossInputs, TokenLoss
from hf_gpipe.planner.costs.layers import ModelLayers
from hf_gpipe.planner.costs.tracing import StageTracer
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime import head
from hf_gpipe.runtime.head import deferred_loss, slice_positions
from hf_gpipe.tasks.distil import DistillationLoss
from hf_gpipe.tasks.grpo.loss import TemperedLoss
from tests.oracle import (
    VOCABULARY,
    Result,
    assert_same,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    tiny_config,
)
from tests.versions import OF_POSITIONS

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
#: With caps, scales and biases that are large enough to be noticed.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**_SIZES, final_logit_softcapping=0.5),
    "cohere": CohereConfig(**_SIZES, logit_scale=3.0),
    "granite": GraniteConfig(**_SIZES, logits_scaling=0.2),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, **_NO_DROPOUT),
    "t5": T5Config(**_T5, tie_word_embeddings=False),
    "t5, tied": T5Config(**_T5, tie_word_embeddings=True),
    "bart": tiny_config("bart"),
    "marian": tiny_config("marian", tied=False),
}
EXACT = ("llama", "llama, tied", "gpt2", "bart", "marian")


@pytest.mark.parametrize("name", CONFIGS)
def test_families_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 positions end within rows. The second step adds to gradients that are there."""
    config = CONFIGS[name]
    model = plain_model(config)
    if name == "marian":
        model.final_logits_bias.normal_()
    batch = padded_batch(config)
    expected = run_plain(model, batch, 2)
    monkeypatch.setattr(head, "slice_positions", lambda width, vocabulary: 7)
    recompute = "stage" if "tied" in name else "none"
    pipe = Pipeline(model, 2, 2, recompute=recompute, label_smoothing=0.0)
    assert pipe.adapter.projection.names == ("lm_head",)
    # The norms of some families compute in float32.
    tolerance = 1e-12 if name in EXACT else 1e-8
    assert_same(run_pipeline(pipe, batch), expected, tolerance)
    again = float(pipe.train_step(batch))
    assert again == pytest.approx(expected.loss, rel=tolerance)
    twice = {key: p.grad / 2 for key, p in pipe.named_parameters() if p.grad is not None}
    assert_same(Result(again, twice), expected, tolerance)


@pytest.mark.parametrize(("name", "schedule"), [("llama", "gpipe"), ("llama, tied", "zb_h1"), ("marian", "1f1b")])
def test_hooks_on_saved_tensors_keep_the_gradient_of_the_weight(name: str, schedule: str) -> None:
    """Under save_on_cpu the gradient of the head's weight went to the copy that the hook gave back, and was lost."""
    config = CONFIGS[name]
    model, batch = plain_model(config), padded_batch(config)
    expected = run_plain(model, batch, 2)
    for recompute in ("none", "stage"):
        with torch.autograd.graph.save_on_cpu():
            assert_same(run_pipeline(Pipeline(model, 2, 2, schedule, recompute), batch), expected)


def test_smoothing_and_clipping_of_capped_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["gemma2"]
    model = plain_model(config)
    batch = padded_batch(config)
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    bound = float(logits.detach().abs().median())
    loss = F.cross_entropy(logits.clamp(-bound, bound), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    loss.backward()
    monkeypatch.setattr(head, "slice_positions", lambda width, vocabulary: 5)
    pipe = Pipeline(model, 2, 3, label_smoothing=0.1, logit_clipping=bound)
    found = run_pipeline(pipe, batch)
    assert found.loss == pytest.approx(loss.item(), rel=1e-8)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=1e-7, atol=1e-8)


projection_of = cache(Projection)
"""A layer's class is extended once."""


def deferred_of(linear: nn.Linear, hidden: torch.Tensor, scale: float | None, cap: float | None) -> DeferredLogits:
    """The deferred logits of a model that is a head with a scale and a soft cap."""
    deferred = DeferredLogits()

    def forward() -> dict[str, torch.Tensor]:
        logits = linear(hidden)
        if scale is not None:
            logits = logits * scale
        return {"logits": logits if cap is None else torch.tanh(logits / cap) * cap}

    projection_of(linear).run(forward, deferred)
    return deferred


def plain_loss(
    linear: nn.Linear, hidden: torch.Tensor, scale: float | None, cap: float | None, loss: TokenLoss, targets: Any
) -> torch.Tensor:
    logits = F.linear(hidden, linear.weight, linear.bias)
    if scale is not None:
        logits = logits * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    flat = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    if loss.logit_clipping is not None:
        flat = flat.clamp(-loss.logit_clipping, loss.logit_clipping)
    return F.cross_entropy(flat, targets.flatten(), reduction="sum", label_smoothing=loss.label_smoothing) / 11


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    width=st.integers(1, 4),
    vocabulary=st.integers(1, 9),
    positions=st.integers(1, 16),
    has_bias=st.booleans(),
    has_gradients=st.booleans(),
    scale=st.none() | st.just(0.25),
    cap=st.none() | st.just(1.5),
    smoothing=st.sampled_from([0.0, 0.1]),
    clipping=st.none() | st.just(0.4),
    trained=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def test_any_shapes_and_chunks(
    seed: int,
    shape: tuple[int, int],
    width: int,
    vocabulary: int,
    positions: int,
    has_bias: bool,
    has_gradients: bool,
    scale: float | None,
    cap: float | None,
    smoothing: float,
    clipping: float | None,
    trained: tuple[bool, bool],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(width, vocabulary, bias=has_bias, dtype=torch.float64).requires_grad_(trained[1])
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(*shape, width, generator=generator, dtype=torch.float64).requires_grad_(trained[0])
    targets = torch.randint(0, vocabulary, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.2] = -100
    loss, added = TokenLoss(smoothing, clipping), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    tensors = [tensor for tensor in (hidden, *linear.parameters(), added) if tensor.requires_grad]
    expected = plain_loss(linear, hidden, scale, cap, loss, targets) + added
    wanted = torch.autograd.grad(expected, tensors, torch.tensor(3.0, dtype=torch.float64))
    if has_gradients:
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
    found = deferred_loss(deferred_of(linear, hidden, scale, cap), targets, loss, LossInputs({}, 11), added, positions)
    found.backward(torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for tensor, gradient in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, gradient + int(has_gradients), rtol=1e-11, atol=1e-11)
    assert all(parameter.grad is None for parameter in linear.parameters() if not parameter.requires_grad)


@pytest.mark.parametrize("is_autocast", [True, False])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_half_precision_computes_in_the_same_types(cap: float | None, is_autocast: bool) -> None:
    """Against the same operations on whole logits, in the types that the plain model has."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 40, dtype=torch.float32 if is_autocast else torch.bfloat16)
    hidden = torch.randn(2, 6, 8, dtype=linear.weight.dtype, requires_grad=True)
    targets, loss = torch.randint(0, 40, (2, 6)), TokenLoss(0.1, 2.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        expected = plain_loss(linear, hidden, None, cap, loss, targets)
        deferred = deferred_of(linear, hidden, None, cap)
    wanted = torch.autograd.grad(expected, [hidden, *linear.parameters()])
    found = deferred_loss(deferred, targets, loss, LossInputs({}, 11), None, 5)
    found.backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for tensor, gradient in zip([hidden, *linear.parameters()], wanted, strict=True):
        assert tensor.grad is not None
        assert tensor.grad.dtype == tensor.dtype
        assert float((tensor.grad - gradient).norm() / gradient.norm()) < 1e-2


def test_hooks_on_the_weight_are_called_once() -> None:
    """Replicas send a gradient when autograd says that it is complete."""
    torch.manual_seed(0)
    linear, targets, hidden = nn.Linear(4, 9, bias=False), torch.randint(0, 9, (1, 6)), torch.randn(1, 6, 4)
    seen: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        deferred_loss(
            deferred_of(linear, hidden, None, None), targets, TokenLoss(), LossInputs({}, 1), None, 2
        ).backward()
        assert linear.weight.grad is not None
        return linear.weight.grad

    once, twice = backward().clone(), backward().clone()
    linear.weight.grad = None
    linear.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    assert torch.equal(backward(), once)
    assert torch.equal(
        backward(), twice
    )  # the same sums as without hooks, and no gradient beside the one that is there
    assert [torch.equal(one, other) for one, other in zip(seen, (once, twice), strict=True)] == [True, True]


def test_without_anything_trained_the_loss_is_there_at_once_and_without_a_graph_nothing_is_computed() -> None:
    linear = nn.Linear(4, 9).requires_grad_(False)
    hidden, targets = torch.randn(1, 6, 4), torch.randint(0, 9, (1, 6))
    expected = plain_loss(linear, hidden, None, None, TokenLoss(), targets)
    found = deferred_loss(deferred_of(linear, hidden, None, None), targets, TokenLoss(), LossInputs({}, 11), None, 4)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert deferred_loss(deferred_of(linear, hidden, None, None), targets, TokenLoss(), LossInputs({}, 11)) == 0


#: A model's own repository may have such classes; those of a user's script are refused before.
_REPOSITORY = """
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class Changing(LlamaForCausalLM):
    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.changed(self.lm_head(hidden))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class InPlace(Changing):
    def changed(self, logits):
        return logits.mul_(2.0)


class AcrossPositions(Changing):
    def changed(self, logits):
        return logits.cumsum(1) / 4
"""
_classes: dict[str, Any] = {"__name__": "transformers_modules.own"}
exec(_REPOSITORY, _classes)


class _NotLinear(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head.__class__ = type("OwnLinear", (nn.Linear,), {"forward": lambda self, x: F.linear(x, self.weight)})


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (_classes["InPlace"], "it changes its logits in place, by mul_"),
        (_classes["AcrossPositions"], "its logits made in parts differ by"),
        (_NotLinear, "its head is a OwnLinear, not a linear layer"),
    ],
)
def test_other_models_make_whole_logits_and_say_so(
    model_class: type[LlamaForCausalLM], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = copy.deepcopy(CONFIGS["llama"])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).double().train()
    batch = padded_batch(config)
    expected = run_plain(model, batch, 2)
    with caplog.at_level(logging.WARNING):
        pipe = Pipeline(model, 2, 2, attn_implementation="eager")
    assert not pipe.adapter.projection.names
    assert pipe.adapter.projection.reason.startswith(reason)
    assert f"training makes the logits of a micro-batch whole: {pipe.adapter.projection.reason}" in caplog.text
    assert_same(run_pipeline(pipe, batch), expected, 1e-8)


def test_the_planner_counts_a_chunk_and_not_the_logits() -> None:
    """Also for a cap, which needs more tensors of a chunk; and nothing of the head runs in F."""
    vocabulary, workload = 1 << 17, Workload(rows=4, source_tokens=128, target_tokens=128)
    for name, most in (("llama", 2), ("gemma2", 8)):
        adapter = adapter_for(type(CONFIGS[name])(**(CONFIGS[name].to_dict() | {"vocab_size": vocabulary})))
        last = len(adapter.layers) - 1
        stage = StageTracer(adapter, range(last, last + 1), ModelLayers(adapter).wants_gradient)
        found = stage.trace(workload.micro_batch(adapter))
        positions = 4 * 128
        logits, chunk = positions * vocabulary * 4, slice_positions(16, vocabulary) * vocabulary * 4
        assert chunk == logits // 8
        assert found.saves_hidden
        assert found.saved < positions * 8 + 100, "the targets"
        assert found.forward.flops <= OF_POSITIONS * found.backward.flops
        assert max((0, *found.forward_levels)) < chunk // 8
        assert found.backward.flops == 3 * 2 * positions * 16 * vocabulary
        assert chunk <= max(found.backward_levels) <= most * chunk


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_a_lack_of_memory_is_no_reason_to_make_logits_whole(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process would add up in another order than the others, with a warning and the exit code 0."""

    def fail(deferred: object) -> None:
        raise error

    monkeypatch.setattr("hf_gpipe.adapters.modules.head._in_parts", fail)
    with pytest.raises(type(error)):
        observe(plain_model(tiny_config("llama")))


def test_the_planner_runs_every_loss_without_memory() -> None:
    """The head of a loss that reads a value runs on real tensors: that of a loss of rows did, where units were checked,
    and that of distillation, whose positions were cut by a tensor of them, for minutes."""
    adapter = adapter_for(CONFIGS["llama"])
    last = len(adapter.layers) - 1
    distillation = (DistillationLoss(beta=beta, cross_entropy_share=0.5) for beta in (0.0, 0.5, 1.0))
    own = RowLoss(lambda log_probs, inputs: log_probs), LogitsLoss(lambda *_, **__: None)
    for loss in (*own, *distillation, TokenLoss(0.1), TokenLoss(is_dynamic=True), TemperedLoss(temperature=0.5)):
        wants_gradient = ModelLayers(adapter).wants_gradient
        stage = StageTracer(adapter, range(last, last + 1), wants_gradient, loss=loss.planned)
        stage.trace(Workload(rows=4, source_tokens=8, target_tokens=8).micro_batch(adapter))
        assert not stage.is_real, loss
