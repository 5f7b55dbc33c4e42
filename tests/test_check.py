"""`python -m hf_gpipe check`: the verdict, the exit code, and that a pipeline makes the same comparison by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DogeConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedConfig,
    T5Config,
    TrOCRConfig,
    XLMConfig,
    ZambaConfig,
)

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for, families, stubs
from hf_gpipe.adapters.guards import check_sizes
from hf_gpipe.adapters.modules.weight_gradients import Product
from hf_gpipe.adapters.observation.probe import _routers
from hf_gpipe.adapters.observation.structure import unlike_default
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.commands import check
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.model import exactness
from hf_gpipe.model.exactness import CloneError, compare
from tests.oracle import plain_model
from tests.versions import needs_mended_doge

RECIPE = """
model:
  config: {{model_type: {family}}}
data: {{kind: cldr, languages: [de]}}
tokenizer: {{vocab_size: 300}}
pipeline: {{num_stages: 2}}
training: {{output_dir: {output}}}
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_an_exact_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GraniteConfig(embedding_multiplier=3.0).save_pretrained(tmp_path)
    assert check.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24
    assert lines[0].startswith("model      granite, transformers")
    assert lines[-1] == "verdict    exact"
    assert any(line.startswith(" 3 stages") for line in lines)
    assert any(line.startswith(" 7 stages") for line in lines)


def test_a_recipe_and_its_number_of_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(family="marian", output=tmp_path / "out"))
    assert check.main([str(path), "pipeline.num_stages=4"]) == 0
    assert " 4 stages" in capsys.readouterr().out


def test_a_model_that_is_not_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ZambaConfig().save_pretrained(tmp_path)
    assert check.main([str(tmp_path)]) == 1
    assert "not exact: a tiny clone differs by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such-model"], "no/such-model"),
        (["missing.yaml"], "missing.yaml"),
        (["x", "pipeline.num_stages=2"], "num_stages"),
    ],
)
def test_what_the_user_can_correct(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unlisted_family_is_compared_before_a_pipeline_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    monkeypatch.setattr("hf_gpipe.adapters.EXACT", frozenset())
    Pipeline(config, 2)
    # What is lost between two stages must be seen.
    monkeypatch.setattr(stubs.PassThrough, "forward", _loses_a_little)
    with pytest.raises(UnsupportedModelError, match=r"'llama' is not supported: .* differs by"):
        Pipeline(config, 2)


@pytest.mark.parametrize(
    ("config", "odd"),
    [
        (LlamaConfig(hidden_size=64, num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.1), []),
        (LlamaConfig(hidden_act="gelu", rms_norm_eps=1e-5, pad_token_id=0, output_router_logits=True), []),
        (LlamaConfig(attention_bias=True), ["attention_bias"]),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0}), ["rope_parameters.rope_type"]),
        (T5Config(feed_forward_proj="gated-gelu"), ["feed_forward_proj"]),
        (DogeConfig(is_moe=True), ["is_moe"]),
    ],
)
def test_a_configuration_that_runs_other_code_than_the_default_is_compared(
    config: PreTrainedConfig, odd: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a listed family the default configuration alone was compared: is_moe of doge was never seen, and wrong."""
    if config.model_type == "doge":
        needs_mended_doge()
    assert [name for name in unlike_default(config) if name != "is_gated_act"] == odd
    compared: list[str] = []
    monkeypatch.setattr("hf_gpipe.model.opening.verify", lambda adapter: compared.append(adapter.config.model_type))
    Pipeline(tiny_config(config), 2)
    assert len(compared) == bool(odd)


def test_equal_clones_of_a_listed_family_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[PreTrainedConfig] = []
    monkeypatch.setattr(
        exactness, "compare", lambda config, *args, **options: (calls.append(config), compare(config))[1]
    )
    for width in (16, 32, 48):
        config = LlamaConfig(
            hidden_size=width, intermediate_size=16, num_attention_heads=2, mlp_bias=True, rope_theta=7.0
        )
        exactness.verify(adapter_for(config))
    assert len(calls) == 1


def test_places_of_layers_may_count_from_the_end() -> None:
    """As in the checkpoints of Vip-Llava; they were taken for numbers of layers."""
    check_sizes({"vision_feature_layers": [-2, -5, -8, -11, 6]})


def test_routers_whose_logits_transformers_loses() -> None:
    """Granitemoe's of transformers 5.17, whose auxiliary loss is then 0; they ended in a TypeError."""
    calls: Any = SimpleNamespace(result=SimpleNamespace(aux_loss=0.0, router_logits=None), tensors={})
    with pytest.raises(UnsupportedModelError, match=r"cannot be followed .* set output_router_logits to false"):
        _routers(plain_model(tiny_config(LlamaConfig())), calls, [])


def test_a_loss_of_its_own_is_named() -> None:
    """TrOCR does not shift its labels, and was trained for the next token."""
    with pytest.raises(
        UnsupportedModelError, match=r"trocr: the model's own loss is .* cross-entropy of the next token"
    ):
        compare(TrOCRConfig())


def _loses_a_little(self: stubs.PassThrough, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] * 1.000001
    if self.port is not None:
        self.port.captured = hidden
    return hidden if self.num_outputs is None else (hidden, *[None] * (self.num_outputs - 1))


def test_a_refused_family_is_named_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'zamba' is not supported: .*share weights.*: llama"):
        Pipeline(ZambaConfig(), 2)
    assert "zamba" in families.REFUSED


def test_a_model_that_runs_but_is_no_list_of_layers_is_not_one_that_fails() -> None:
    """The report of the families said of some that no clone of them could be built."""
    with pytest.raises(UnsupportedModelError, match="expected 1 list") as error:
        compare(XLMConfig())
    assert not isinstance(error.value, CloneError)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(output_hidden_states=True), "output_hidden_states is set"),
        (LlamaConfig(output_attentions=True, attn_implementation="eager"), "output_attentions is set"),
        (LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4}), "quantised"),
        (T5Config(output_router_logits=True), "output_router_logits is set"),
    ],
)
def test_what_a_configuration_may_not_ask_for(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Pipeline(config, 1)


def test_models_that_something_is_wrapped_around() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    model = LlamaForCausalLM(config)
    with pytest.raises(UserError, match="DataParallel"):
        Pipeline(nn.DataParallel(model), 2)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(UserError, match="device_map"):
        Pipeline(model, 2)


def test_a_difference_of_float32_size_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs.PassThrough, "forward", _loses_a_little)
    comparison = compare(LlamaConfig())
    assert comparison.dtype == torch.float64
    assert not comparison.is_exact


def test_logits_in_float32_have_a_tolerance_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compare(MambaConfig())
    assert (comparison.dtype, comparison.loss_dtype) == (torch.float64, torch.float32)
    assert comparison.is_exact
    monkeypatch.setattr(stubs.PassThrough, "forward", _loses_a_little)
    assert not compare(MambaConfig()).is_exact


def test_a_schedule_with_i_and_w_is_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    assert compare(config, (3,), splits_backward=True).is_exact
    monkeypatch.setattr("hf_gpipe.pipeline.decision.is_known_exact", lambda adapter: False)
    monkeypatch.setattr(Product, "add", lambda self: None)
    Pipeline(config, 2, 2, "1f1b")
    with pytest.raises(UnsupportedModelError, match=r"schedule that has I and W .*gradients of other parameters"):
        Pipeline(config, 2, 2, "zb_h1")
