"""`hf-gpipe check`: the verdict, the exit code, and that a pipeline makes the same comparison by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    DistilBertConfig,
    DogeConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MiniCPM3Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    T5Config,
    T5Gemma2Config,
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
from hf_gpipe.pipeline import exactness
from hf_gpipe.pipeline.exactness import CloneError, compare
from hf_gpipe.pipeline.variant import Variant
from tests.oracle import plain_model
from tests.versions import OLD_TRANSFORMERS, needs_mended_doge

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


def test_a_model_that_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    GraniteConfig().save_pretrained(tmp_path)
    monkeypatch.setattr(stubs.PassThrough, "__call__", _loses_a_little)
    assert check.main([str(tmp_path)]) == 1
    assert "not exact: a tiny clone differs by" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ZambaConfig(), "some of its blocks share weights"),
        (BartConfig(decoder_layerdrop=0.05), "decoder_layerdrop is 0.05"),
        (BartConfig(encoder_layerdrop=0.05, num_labels=2, architectures=["BartModel"]), "encoder_layerdrop is 0.05"),
        (LlamaConfig(output_hidden_states=True), "output_hidden_states is set"),
        (LlamaConfig(quantization_config={"quant_method": "awq", "bits": 4}), "quantised"),
        (
            DistilBertConfig(architectures=["DistilBertForSequenceClassification"]),
            "DistilBertForSequenceClassification cannot be split",
        ),
    ],
)
def test_what_a_pipeline_does_not_support_is_not_exact(
    config: PreTrainedConfig, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clone has no layerdrop, and was called exact; a classifier was checked as a language model."""
    config.save_pretrained(tmp_path)
    assert check.main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().out
    with pytest.raises(UnsupportedModelError, match=message):
        Pipeline(type(config).from_pretrained(tmp_path), 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.packing=true", "documents in one row change each other's logits"),
        ("pipeline.sequence_chunks=2", "leave sequence_chunks out"),
    ],
)
def test_what_a_recipe_asks_for_is_checked(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clone was compared without the recipe's packing and chunks, which a run of it does not support."""
    path = tmp_path / "recipe.yaml"
    text = RECIPE.format(family="mamba", output=tmp_path / "out")
    path.write_text(text.replace("{kind: cldr, languages: [de]}", "{kind: text, path: a.txt}"))
    assert check.main([str(path)]) == 0
    assert check.main([str(path), override]) == 1
    assert message in capsys.readouterr().out


#: As published, apart from the values of their factors, which are longer lists than a clone's heads are wide.
LONG_FACTORS = [1.0 + 1.3 * i for i in range(64)]
PUBLISHED = {
    "Phi-3.5-mini": Phi3Config(
        **{"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072},
        **{"original_max_position_embeddings": 4096, "sliding_window": 262144, "pad_token_id": 32000},
        rope_scaling={"type": "longrope", "short_factor": LONG_FACTORS[:48], "long_factor": LONG_FACTORS[:48][::-1]},
    ),
    "Phi-4-mini": Phi3Config(
        **{"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
        **{"num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"original_max_position_embeddings": 4096, "sliding_window": 262144, "pad_token_id": 199999},
        **{"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "eos_token_id": 199999, "bos_token_id": 199999},
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": LONG_FACTORS[:48]},
    ),
    "Phi-3.5-MoE": PhimoeConfig(
        **{"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
        rope_scaling={
            **{"type": "longrope", "short_factor": LONG_FACTORS, "long_factor": LONG_FACTORS[::-1]},
            **{"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
            "original_max_position_embeddings": 4096,
        },
    ),
    "MiniCPM3": MiniCPM3Config(
        **{"vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62},
        **{"num_attention_heads": 40, "num_key_value_heads": 40, "q_lora_rank": 768, "kv_lora_rank": 256},
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "max_position_embeddings": 32768},
        **{"scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4},
        rope_scaling={
            **{"type": "longrope", "short_factor": LONG_FACTORS[:16], "long_factor": LONG_FACTORS[:16]},
            "original_max_position_embeddings": 32768,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_with_longrope(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their clones could not be built: there were more factors than the clone's heads have frequencies."""
    if name == "MiniCPM3" and OLD_TRANSFORMERS:
        pytest.skip("transformers 5.17 makes no model of this configuration, because it has no factor")
    PUBLISHED[name].save_pretrained(tmp_path)
    assert check.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "verdict    exact"
    adapter = adapter_for(PUBLISHED[name])
    assert adapter.padding_matters_beyond == (32768 if name == "MiniCPM3" else 4096)


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
    monkeypatch.setattr(stubs.PassThrough, "__call__", _loses_a_little)
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
    monkeypatch.setattr("hf_gpipe.pipeline.probe.verify", lambda adapter, how: compared.append(str(how)))
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
        exactness.verify(adapter_for(config), Variant())
    assert len(calls) == 1


def test_places_of_layers_may_count_from_the_end() -> None:
    """As in the checkpoints of Vip-Llava; they were taken for numbers of layers."""
    check_sizes({"vision_feature_layers": [-2, -5, -8, -11, 6]})


@pytest.mark.parametrize("token", [{}, {"id": 1}, 1.5, "2", [1, None, "x"]])
def test_a_token_s_number_is_a_whole_number(token: object) -> None:
    """An object in its place was taken for a configuration, and ended the generation after the training."""
    with pytest.raises(UserError, match=r"generation_config\.json: forced_eos_token_id is .* expected a whole number"):
        check_sizes({"forced_eos_token_id": token}, "generation_config.json: ")


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
    monkeypatch.setattr(stubs.PassThrough, "__call__", _loses_a_little)
    comparison = compare(LlamaConfig())
    assert comparison.dtype == torch.float64
    assert not comparison.is_exact


def test_logits_in_float32_have_a_tolerance_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compare(MambaConfig())
    assert (comparison.dtype, comparison.loss_dtype) == (torch.float64, torch.float32)
    assert comparison.is_exact
    monkeypatch.setattr(stubs.PassThrough, "__call__", _loses_a_little)
    assert not compare(MambaConfig()).is_exact


def test_a_clone_without_numbers_in_float64_is_compared_in_float32() -> None:
    """T5Gemma2's softmax is in float32, where a float64 mask of a whole row is infinite: it was not compared at all."""
    comparison = compare(T5Gemma2Config())
    assert comparison.dtype == torch.float32
    assert comparison.is_exact


def test_a_schedule_with_i_and_w_is_checked_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=50
    )
    assert compare(config, (3,), splits_backward=True).is_exact
    monkeypatch.setattr("hf_gpipe.pipeline.probe.is_known_exact", lambda adapter: False)
    monkeypatch.setattr(Product, "add", lambda self: None)
    Pipeline(config, 2, 2, "1f1b")
    with pytest.raises(UnsupportedModelError, match=r"schedule that has I and W .*gradients of other parameters"):
        Pipeline(config, 2, 2, "zb_h1")
