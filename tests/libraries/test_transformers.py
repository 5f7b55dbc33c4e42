"""The private names of transformers, peft, datasets and accelerate do what `hf_gpipe/libraries/` says of them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftType, PrefixTuningConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MarianConfig,
    MistralConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries import accelerate, datasets, peft, transformers_trainer
from hf_gpipe.libraries import transformers as own

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


MAMBA = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
MARIAN = MarianConfig(
    **{"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2},
    **{"decoder_attention_heads": 2, "pad_token_id": 0, "decoder_start_token_id": 0},
)


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), MAMBA, MARIAN], ids=lambda config: config.model_type)
def test_the_cache_argument_is_the_one_that_generate_gives(config: Any) -> None:
    """transformers 5.24 renamed it; generate then gave stages no keys of earlier tokens, and wrote other text."""
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    name, given = own.cache_argument(model), []
    forward = model.forward

    def watched(**inputs: Any) -> Any:
        given.append(inputs.get(name))
        output = forward(**inputs)
        assert output[name] is inputs[name]
        return output

    watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = watched
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
    assert len(given) == 3
    assert all(isinstance(cache, transformers.Cache) for cache in given)


def test_a_model_without_a_cache_argument_is_named() -> None:
    model = llama()
    model.forward = lambda input_ids: None
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM: its forward has no argument '"):
        own.cache_argument(model)


def test_slots_of_caches() -> None:
    """A slot grows by the tokens of a forward, and one of a window keeps the tokens that the next one attends to."""
    keys = torch.randn(1, 1, 5, 4)
    full, window = own.DynamicLayer(), own.DynamicSlidingWindowLayer(3)
    assert isinstance(full, own.CacheLayerMixin)
    for slot, attended, kept in ((full, 5, 5), (window, 5, 2)):
        assert slot.get_mask_sizes(5) == (5, 0)
        assert slot.update(keys, keys)[0].shape[2] == attended
        assert slot.get_seq_length() == 5
        assert slot.keys.shape[2] == kept
    assert full.get_mask_sizes(1) == (6, 0)
    assert window.get_mask_sizes(1) == (3, 3)
    cache = transformers.DynamicCache(config=MistralConfig(**SIZES, sliding_window=3))
    assert [type(slot) for slot in cache.layers] == [own.DynamicSlidingWindowLayer] * 2


def test_attention_of_a_configuration() -> None:
    for name in ("eager", "sdpa"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation=name)
        assert own.attention_implementation(model.config) == name
    assert own.attention_implementation(SimpleNamespace()) is None
    assert own.heeds_attention(model)
    assert not own.heeds_attention(SimpleNamespace())  # type: ignore[arg-type]
    assert {"sdpa", "flash_attention_2"} <= set(own.ALL_ATTENTION_FUNCTIONS.valid_keys())
    assert {"eager", "sdpa"} <= set(own.ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())


def test_a_model_of_a_class_in_a_type() -> None:
    made = own.from_config(LlamaForCausalLM, LlamaConfig(**SIZES), dtype=torch.bfloat16, attn_implementation="eager")
    assert isinstance(made, LlamaForCausalLM)
    assert made.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with own.local_torch_dtype(torch.float64):
        assert torch.zeros(1).dtype == torch.float64


def test_eager_experts() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2)
    own.with_eager_experts(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.dtype == torch.float64


def test_where_a_model_comes_from(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert own.source_of(model) == own.source_of(model.config) == str(tmp_path)
    assert own.source_of(SimpleNamespace()) == ""
    assert own.commit_of(model.config) is None
    model.config._commit_hash = "abc"
    assert own.commit_of(model.config) == "abc"
    changed = {name for name, value in vars(model.config).items() if value != vars(LlamaConfig(**SIZES)).get(name)}
    assert changed & set(own.OF_SOURCE)


def test_weights_are_filled_where_they_are_not_marked() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5))
    own.forget_initialisation(model)
    own.allocate(model, torch.device("cpu"))
    own.fill_unmarked(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert 0.3 < float(model.lm_head.weight.detach().std()) < 0.7
    assert bool((model.model.norm.weight == 1).all())
    before = model.lm_head.weight.clone()
    own.fill_unmarked(model)  # everything is marked now
    assert torch.equal(model.lm_head.weight, before)
    assert all(hasattr(PreTrainedModel, name) for name in own.INITIALISERS)


def test_files_are_loaded_by_the_library_s_conversions(tmp_path: Path) -> None:
    """A mixture of experts has its experts one by one in the files, and together in the model."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2)
    expected = AutoModelForCausalLM.from_config(config)
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own.forget_initialisation(model)
    file = own.cached_file(str(tmp_path), own.SAFE_WEIGHTS_NAME)
    first, last = own.load_files(model, [Path(str(file))], str(tmp_path), torch.device("cpu"), torch.float32, None)
    assert not first.mismatched_keys
    assert not last.missing_keys
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    written = own.revert_weight_conversion(model, model.state_dict())
    assert any("experts.1." in name for name in written)
    assert not any("experts.1." in name for name in model.state_dict())
    rules = own.get_model_conversion_mapping(model)
    assert any(isinstance(rule, own.WeightConverter) for rule in rules)


def test_what_may_be_missing() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    info = SimpleNamespace(missing_keys={"lm_head.weight"}, unexpected_keys={"transformer.h.0.attn.bias", "odd"})
    own.drop_expected_keys(model, info)
    assert info.unexpected_keys == {"odd"}
    model._keys_to_ignore_on_save = ["a"]
    assert own.unsaved_keys(model) == {"a"}
    assert own.unsaved_keys(llama()) == set()


def test_a_table_that_was_trained_is_saved(tmp_path: Path) -> None:
    """Marian's positions, which transformers 5.24 trains once they were read, began anew where a run was resumed."""
    made = transformers.MarianMTModel(MARIAN)
    made.save_pretrained(tmp_path)
    model, name = transformers.MarianMTModel.from_pretrained(tmp_path), "model.encoder.embed_positions.weight"
    assert name in own.unsaved_keys(made) & own.unsaved_keys(model)
    table = model.get_parameter(name)
    assert table.requires_grad
    with torch.no_grad():
        table.add_(0.1)
    assert name not in own.unsaved_keys(model)


def test_blocks_are_run_by_the_given_function() -> None:
    model, calls = llama().train(), []

    def run(function: Any, *args: Any, **options: Any) -> Any:
        calls.append(function)
        return checkpoint(function, *args, use_reentrant=False, **options)

    blocks = [module for module in model.modules() if isinstance(module, own.GradientCheckpointingLayer)]
    assert len(blocks) == 2
    for block in blocks:
        own.checkpoint_with(block, run)
    cache = transformers.DynamicCache(config=model.config)
    name = own.cache_argument(model)
    output = model(torch.ones(1, 3, dtype=torch.long), **{name: cache, "use_cache": True})
    assert len(calls) == 2
    assert cache.get_seq_length() == 3
    output.logits.sum().backward()


def test_rows_are_not_searched_for_documents() -> None:
    model = llama()
    ids, positions = torch.tensor([[3, 9, 4, 7]]), torch.tensor([[0, 1, 0, 1]])
    whole = model(ids).logits
    packed = model(ids, position_ids=positions, use_cache=False).logits
    with own.rows_of_one_text():
        read = model(ids, position_ids=positions, use_cache=False).logits
    assert not torch.allclose(packed, read)
    assert whole.shape == read.shape


def test_the_tables_of_families() -> None:
    assert own.MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig] is LlamaForCausalLM
    assert own.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["llama"] == "LlamaForCausalLM"
    assert own.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["marian"] == "MarianMTModel"
    assert own.MODEL_FOR_MASKED_LM_MAPPING[transformers.BertConfig] is transformers.BertForMaskedLM
    assert "llava" in own.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert transformers.LlavaConfig in own.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    assert own.modeling_auto.MODEL_MAPPING[LlamaConfig] is transformers.LlamaModel
    assert "vit" in own.IMAGE_PROCESSOR_MAPPING_NAMES
    assert callable(own.AutoImageProcessor.from_pretrained)
    assert own.LOSS_MAPPING["ForCausalLM"].__module__.startswith("transformers.")


def test_the_linear_layer_of_gpt2_and_grouped_heads() -> None:
    layer = own.Conv1D(5, 3)
    assert layer.weight.shape == (3, 5)
    assert own.repeat_kv(torch.zeros(1, 2, 4, 8), 3).shape == (1, 6, 4, 8)
    assert own.LOSS_ATTRIBUTE in {"_loss_function"}
    model = llama()
    model.loss_function = lambda **_: 1
    assert own.LOSS_ATTRIBUTE in vars(model)


def test_quantisation_is_found_by_its_configuration() -> None:
    config = own.AutoQuantizationConfig.from_dict({"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert config.load_in_4bit
    assert own.is_bitsandbytes_available() and own.is_peft_available()  # noqa: PT018
    quantizer = own.AutoHfQuantizer.from_config(config)
    assert quantizer.quantization_config is config


def test_code_of_a_model_is_saved_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "code", tmp_path / "target"
    folder.mkdir()
    target.mkdir()
    (folder / "modeling_of_test.py").write_text("class Own:\n    pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    own.custom_object_save(importlib.import_module("modeling_of_test").Own(), target)
    assert [path.name for path in target.iterdir()] == ["modeling_of_test.py"]


def test_names_of_files() -> None:
    assert own.CONFIG_NAME == "config.json"
    assert own.GENERATION_CONFIG_NAME == "generation_config.json"
    assert own.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"
    assert own.ModelOutput(a=1)["a"] == 1


# ---------------------------------------------------------------------- the trainer


def test_names_of_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(
        llama(), TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, hub_strategy="end", save_strategy="no")
    )
    args = trainer.args
    assert args.parallel_mode == transformers_trainer.ParallelMode.NOT_PARALLEL
    assert args.hub_strategy == transformers_trainer.HubStrategy.END
    assert args.save_strategy == transformers_trainer.SaveStrategy.NO
    assert args.logging_strategy == transformers_trainer.IntervalStrategy.STEPS
    assert isinstance(trainer.callback_handler, transformers_trainer.CallbackHandler)
    assert "accelerator_config" in transformers_trainer.FIELDS_OF_JSON
    assert issubclass(transformers.EarlyStoppingCallback, transformers_trainer.ExportableState)
    assert transformers_trainer.get_reporting_integration_callbacks([]) == []
    transformers_trainer.save_metrics(trainer, "eval", {"eval_loss": 1.0})
    transformers_trainer.save_state(trainer)
    assert {"eval_results.json", "all_results.json", "trainer_state.json"} <= {p.name for p in tmp_path.iterdir()}
    assert transformers_trainer.metrics_format({"eval_loss": 0.123456789}) == {"eval_loss": 0.1235}


def test_results_of_the_trainer() -> None:
    assert transformers_trainer.TrainOutput(3, 0.5, {}).global_step == 3
    assert transformers_trainer.PredictionOutput(None, None, {"a": 1.0}).metrics == {"a": 1.0}
    assert transformers_trainer.denumpify_detensorize({"a": torch.tensor(1.5)}) == {"a": 1.5}
    speed = transformers_trainer.speed_metrics("train", 0.0, num_samples=4, num_steps=2)
    assert speed.keys() == {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert callable(transformers_trainer.TrainingSummary.from_trainer)
    optimizer = transformers.Adafactor([nn.Parameter(torch.ones(1))])
    assert len(transformers_trainer.AdafactorSchedule(optimizer).get_lr()) == 1


# ---------------------------------------------------------------------- other libraries


def test_names_of_peft() -> None:
    model = get_peft_model(
        llama(), LoraConfig(target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"])
    ).base_model
    assert isinstance(model, peft.PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA])
    assert isinstance(model, peft.BaseTuner)
    layer = model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, peft.BaseTunerLayer)
    assert isinstance(model.model.model.embed_tokens, peft.LoraEmbedding)
    assert isinstance(model.model.lm_head, peft.ModulesToSaveWrapper)
    assert isinstance(model.model.lm_head, peft.AuxiliaryTrainingWrapper)
    assert issubclass(peft.TrainableTokensWrapper, peft.AuxiliaryTrainingWrapper)
    config = LoraConfig(target_modules=["q_proj"])
    assert peft.check_target_module_exists(config, "model.layers.0.self_attn.q_proj")
    assert not peft.check_target_module_exists(config, "model.layers.0.self_attn.k_proj")
    assert {"embed_tokens", "lm_head"} <= set(peft.EMBEDDING_LAYER_NAMES)
    model.half()
    peft.cast_adapter_dtype(model, "default")
    assert layer.lora_A["default"].weight.dtype == torch.float32
    assert layer.base_layer.weight.dtype == torch.float16
    assert PrefixTuningConfig().peft_type in peft.PEFT_TYPE_TO_TUNER_MAPPING


def test_peft_tells_of_each_layer_before_it_changes_it() -> None:
    model, seen = llama(), []

    def before(name: str) -> None:
        seen.append((name, isinstance(model.get_submodule(name), peft.BaseTunerLayer)))

    with peft.before_each_layer(PeftType.LORA, before):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert seen == [(f"model.layers.{i}.self_attn.q_proj", False) for i in range(2)]
    get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    assert len(seen) == 2


def test_methods_of_peft_that_change_the_whole_model() -> None:
    tuners = peft.PEFT_TYPE_TO_TUNER_MAPPING
    assert not peft.changes_injection(tuners[PeftType.LORA])
    assert peft.changes_injection(tuners[PeftType.VERA])


def test_a_fingerprint_changes_with_the_rows() -> None:
    from datasets import Dataset

    one, other = Dataset.from_dict({"a": [1, 2]}), Dataset.from_dict({"a": [1, 3]})
    assert datasets.fingerprint_of(one) != datasets.fingerprint_of(other)
    assert datasets.fingerprint_of(one) != datasets.fingerprint_of(one.map(lambda row: {"b": row["a"]}))


def test_the_folders_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    prepared, extracted, downloaded = (Path(folder) for folder in datasets.cache_folders())
    assert extracted.parent == downloaded or downloaded in extracted.parents
    assert prepared != downloaded
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    Dataset.from_generator(lambda: iter([{"a": 1}]))
    assert any(tmp_path.iterdir())


def test_accelerate_s_hooks_are_noticed() -> None:
    from accelerate import dispatch_model

    layer = nn.Sequential(nn.Linear(2, 2))
    assert not accelerate.has_hook(layer)
    dispatch_model(layer, {"": "cpu"}, force_hooks=True)
    assert accelerate.has_hook(layer)
