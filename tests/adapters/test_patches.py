"""Models that a user has changed: a stage runs the change as the plain model does, or an error names it."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.observation.skeleton import copy_with_stubs
from hf_gpipe.errors import UserError
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.model.clone import padded_batch as model_batch
from hf_gpipe.model.reference import plain_run
from scripts.families import default_config
from tests.gloo import run_gloo
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

Change = Callable[[PreTrainedModel], Any]


def config_of(family: str) -> PreTrainedConfig:
    if family == "gpt2":
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, pad_token_id=0, **rates)
    if family == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
        return T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return tiny_config("llama")


def scaled_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """An RMSNorm as kernels' authors patch it onto instances: a method that reads the module's own weight."""
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return 1.5 * self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def patch_norms(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(scaled_norm, module)


def wrap(module: nn.Module, factor: float) -> None:
    """A closure over the module's own method."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    module.forward = forward


def patch_with_partial(model: PreTrainedModel) -> None:
    def forward(module: Any, factor: float, hidden: torch.Tensor) -> torch.Tensor:
        return factor * module.down_proj(F.gelu(module.gate_proj(hidden)) * module.up_proj(hidden))

    mlp = model.model.layers[1].mlp
    mlp.forward = partial(forward, mlp, 0.5)


CHANGES: dict[str, tuple[str, Change]] = {
    "norms": ("llama", patch_norms),
    "mlp": ("llama", lambda model: wrap(model.model.layers[0].mlp, 2.0)),
    "attention": ("llama", lambda model: wrap(model.model.layers[2].self_attn, 0.5)),
    "block": ("llama", lambda model: wrap(model.model.layers[1], 0.9)),
    "partial": ("llama", patch_with_partial),
    "linear": ("llama", lambda model: wrap(model.model.layers[0].mlp.up_proj, 3.0)),
    "embedding": ("llama", lambda model: wrap(model.model.embed_tokens, 2.0)),
    "head": ("llama", lambda model: wrap(model.lm_head, 0.5)),
    "gpt2": ("gpt2", lambda model: wrap(model.transformer.h[0].mlp, 2.0)),
    "t5": ("t5", lambda model: wrap(model.encoder.block[1].layer[1], 0.7)),
}


def changed(name: str) -> PreTrainedModel:
    family, change = CHANGES[name]
    model = plain_model(config_of(family))
    change(model)
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_module_of_a_layer_runs_as_it_is(name: str) -> None:
    """A stage ran the class's own forward in place of the one on the instance, with other numbers."""
    model = changed(name)
    batch = padded_batch(config_of(CHANGES[name][0]))
    expected = run_plain(model, batch, 2)
    assert_same_not(expected, run_plain(plain_model(model.config), batch, 2))
    for num_stages, schedule, recompute in ((1, "gpipe", "none"), (3, "zb_h1", "none"), (2, "1f1b", "stage")):
        assert_same(run_pipeline(Pipeline(model, num_stages, 2, schedule, recompute), batch), expected)
    assert_same(run_plain(model, batch, 2), expected)  # the given model is as it was


def assert_same_not(first: Result, second: Result) -> None:
    assert abs(first.loss - second.loss) > 1e-9


def test_in_two_processes() -> None:
    expected = run_plain(changed("mlp"), padded_batch(tiny_config("llama")), 2)
    for found in run_gloo(result_of_the_changed_model, 2):
        assert_same(found, expected)


def result_of_the_changed_model() -> Result:
    pipe = Pipeline(changed("mlp"), 2, 2, "zb_h1")
    return run_pipeline(pipe, padded_batch(tiny_config("llama")) if pipe.world.is_main else None)


def across_layers(model: PreTrainedModel) -> None:
    other = model.model.layers[0].mlp
    model.model.layers[1].mlp.forward = lambda hidden: other(hidden)


def with_a_parameter(model: PreTrainedModel) -> None:
    factor = nn.Parameter(torch.ones(()))
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: factor * original(hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: wrap(model, 2.0), "forward of the module 'at the root' was replaced by wrap.*compute_loss_func"),
        (lambda model: wrap(model.model, 2.0), "forward of the module 'model' was replaced"),
        (lambda model: setattr(model, "loss_function", lambda *_, **__: 0.0), "loss_function of the module 'at the"),
        (lambda model: setattr(model, "generate", print), "generate of the module 'at the root' was replaced"),
        (
            lambda model: model.model.layers[0].compile(),
            "the module 'model.layers.0' was compiled.*set torch_compile=True",
        ),
        (
            lambda model: model.model.layers[0].register_full_backward_hook(print),
            r"'model.layers.0' has backward hooks \(print\)",
        ),
        (lambda model: model.lm_head.register_full_backward_pre_hook(print), "'lm_head' has backward hooks"),
        (lambda model: model.model.layers[0].register_forward_hook(print), "'model.layers.0' has forward hooks"),
        (lambda model: setattr(model.model.layers[0].self_attn, "scaling", None), "has scaling=None"),
        (lambda model: setattr(model.model.layers[0].self_attn, "scaling", torch.ones(2)), "has scaling=tensor"),
        (lambda model: setattr(model, "loss_type", "ForMaskedLM"), "loss_type is 'ForMaskedLM' and stages.*LogitsLoss"),
        (lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.1), "variance_epsilon=0.1"),
        (across_layers, "refers to a LlamaMLP that is not in the same layer"),
        (with_a_parameter, "refers to a Parameter, which cannot be taken to a stage"),
        (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()), "is a Tanh where the configuration"),
    ],
)
def test_what_a_stage_would_not_run_is_an_error(change: Change, message: str) -> None:
    """Each of these changed the plain model's numbers or effects, and the pipeline ignored it."""
    model = plain_model(tiny_config("llama"))
    change(model)
    with pytest.raises(UserError, match=message):
        Pipeline(model, 2, 2)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [("cohere", "logit_scale", 3.0), ("mixtral", "router_aux_loss_coef", 5.0), ("mixtral", "num_experts_per_tok", 1)],
)
def test_a_changed_attribute_of_the_root_is_used(family: str, name: str, value: float) -> None:
    """Stages had the attributes of the root that its configuration makes, so a changed factor of the logits was lost.

    A test of `test_what_a_stage_would_not_run_is_an_error` has the same of other modules, whose values are compared.
    """
    config = default_config(family)
    config.output_router_logits = family == "mixtral"
    model = exact_clone(config, torch.float64)
    batch = {"input_ids": padded_batch(tiny_config("llama"))["input_ids"] % model.config.vocab_size}
    batch["labels"] = batch["input_ids"]
    before = plain_run(model, [batch]).loss
    assert getattr(model, name) != value
    setattr(model, name, value)
    expected = plain_run(model, [batch])
    assert abs(expected.loss - before) > 1e-3
    assert_same(run_pipeline(Pipeline(model, 2, 1), batch), Result(expected.loss, expected.gradients))


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "bart", "m2m_100"])
def test_another_padding_token_after_loading(family: str) -> None:
    """The embedding keeps the padding that it was made with, and this model was an error: scripts set the token."""
    model = exact_clone(default_config(family), torch.float64)
    model.config.pad_token_id = 7
    batch = model_batch(model)
    expected = plain_run(model, [batch])
    assert_same(run_pipeline(Pipeline(model, 2, 1), batch), Result(expected.loss, expected.gradients))


def test_another_padding_token_of_a_classifier() -> None:
    """It finds the last token of a row by the configuration's padding, and its embedding has the earlier one."""
    config = tiny_config("llama")
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").double().train()
    model.config.pad_token_id = 7
    ids = torch.tensor([[3, 4, 5, 7], [3, 0, 7, 7], [8, 9, 0, 10]])
    batch = {"input_ids": ids, "attention_mask": (ids != 7).long(), "labels": torch.tensor([0, 1, 1])}
    loss = model(**batch).loss
    loss.backward()
    expected = Result(loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(run_pipeline(Pipeline(model, 2, 1), batch), expected)


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "m2m_100", "pegasus"])
def test_resized_embeddings_of_an_encoder_decoder(family: str, tmp_path: Path) -> None:
    """They are one module under several names then, and this model was an error."""
    model = exact_clone(default_config(family), torch.float64)
    model.resize_token_embeddings(model.config.vocab_size + 5, mean_resizing=False)
    batch = model_batch(model)
    batch["labels"][0, 0] = batch["input_ids"][0, 0] = model.config.vocab_size - 1
    expected = plain_run(model, [batch])
    pipe = Pipeline(model, 3, 1)
    assert_same(run_pipeline(pipe, batch), Result(expected.loss, expected.gradients))
    pipe.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert abs(plain_run(again, [batch]).loss - expected.loss) < 1e-10


def test_a_gradient_hook_on_a_weight_of_several_stages() -> None:
    """Each stage called it with a part of the gradient."""
    model = plain_model(tiny_config("llama", tied=True))
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    batch = padded_batch(model.config)
    assert_same(run_pipeline(Pipeline(model, 1, 1), batch), run_plain(model, batch, 1))
    with pytest.raises(UserError, match=r"embed_tokens.weight' has a gradient hook \(.*tied over several; remove it"):
        Pipeline(model, 2, 1)


class OwnLoss(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else output.loss + 1
        return output


class OwnMethods(LlamaForCausalLM):
    def greet(self) -> str:
        return "hello"


def test_subclasses_of_a_model() -> None:
    """A subclass's own forward was run for its logits, and its loss was dropped."""
    config, batch = tiny_config("llama"), padded_batch(tiny_config("llama"))
    with pytest.raises(UserError, match=r"OwnLoss overrides forward, .*use LlamaForCausalLM, and give a loss"):
        Pipeline(OwnLoss(config), 2, 2)
    plain = plain_model(config)
    own = OwnMethods(plain.config).double()
    own.load_state_dict(plain.state_dict())
    assert_same(run_pipeline(Pipeline(own, 2, 2), batch), run_plain(plain, batch, 2))


def test_a_changed_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that was put on the class of the model was run for its logits, and its loss was dropped."""
    original = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.loss = None if output.loss is None else 2 * output.loss
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    for model in (tiny_config("llama"), plain_model(tiny_config("llama"))):
        with pytest.raises(UserError, match=r"LlamaForCausalLM.forward was replaced by .*forward of tests"):
            Pipeline(model, 2, 2)


def test_what_transformers_itself_leaves_on_a_model() -> None:
    """Recorded outputs, gradient checkpointing and input gradients leave hooks and functions that change nothing."""
    model, batch = plain_model(tiny_config("llama")), padded_batch(tiny_config("llama"))
    expected = run_plain(model, batch, 2)
    model(**batch, output_hidden_states=True, output_attentions=True)
    model.generate(batch["input_ids"][:1], max_new_tokens=2)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    assert_same(run_pipeline(Pipeline(model, 2, 2), batch), expected)


def test_a_stage_s_copy_shares_nothing_that_changes() -> None:
    """A hook or a child that a stage gets is not the whole model's."""
    whole = adapter_for(tiny_config("llama")).reference
    copied = copy_with_stubs(whole, {})
    assert copied.state_dict().keys() == whole.state_dict().keys()
    mine, others = (
        {id(value) for module in model.modules() for value in vars(module).values() if isinstance(value, dict | set)}
        for model in (copied, whole)
    )
    assert len(mine) > 100
    assert not mine & others


def test_a_copy_is_as_quick_after_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile exchanges `nn.Module.__setstate__`, and every later copy of a model took three times as long."""
    whole = adapter_for(tiny_config("llama")).reference
    set_state, deepcopy, slowly = nn.Module.__setstate__, copy.deepcopy, []

    def noted(value: Any, there: dict[int, Any]) -> Any:
        if isinstance(value, nn.Module) and id(value) not in there:
            slowly.append(type(value))
        return deepcopy(value, there)

    monkeypatch.setattr(nn.Module, "__setstate__", lambda module, state: set_state(module, state))
    monkeypatch.setattr(copy, "deepcopy", noted)
    copy_with_stubs(whole, {})
    assert slowly == []
