"""LoRA on a quantised base: in stages the gradients of plain transformers, peft and bitsandbytes, to the bit."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    GPTQConfig,
    LlamaConfig,
)

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules import quantised
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.planner.costs.layers import LayerTracer, ModelLayers
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import parse_recipe
from tests.gloo import run_gloo
from tests.oracle import Result, padded_batch, run_pipeline
from tests.qlora import LORA, adapters_of, asked, config, expected_step, make, plain_model
from tests.training.toy import trainer

peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A checkpoint with tied and one with untied embeddings, by whether they are tied."""
    found = {}
    for tied in (False, True):
        torch.manual_seed(0)
        found[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        AutoModelForCausalLM.from_config(config(tied=tied)).save_pretrained(found[tied], max_shard_size="100KB")
    return found


def assert_bit_equal(found: Result, expected: Result, tolerance: float = 0.0) -> None:
    """The gradients are the same, or differ by at most so much of the largest value of their parameter."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.any(), name
        assert (found.gradients[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("kind", "num_stages", "options", "tied"),
    [
        ("nf4", 1, {"recompute": "none"}, False),
        ("nf4+", 2, {"recompute": "stage"}, True),
        ("fp4", 3, {"recompute": "block", "schedule": "1f1b"}, False),
        ("fp4+", 2, {"recompute": "none", "schedule": "zb_h1"}, True),
        ("int8", 2, {"recompute": "stage", "schedule": "1f1b"}, False),
        ("nf4", 3, {"recompute": "stage", "dtype": torch.bfloat16}, True),
    ],
)
def test_gradients_are_those_of_plain_peft_to_the_bit(
    kind: str, num_stages: int, options: dict[str, Any], tied: bool, directories: dict[bool, Path]
) -> None:
    pipe = make(directories[tied], kind, num_stages, **options)
    batch = padded_batch(config())
    found = run_pipeline(pipe, batch)
    plain = plain_model(directories[tied], kind, options.get("dtype", torch.float32))
    own = {name.replace(".base_layer", ""): p for name, p in pipe.named_parameters()}
    assert all(torch.equal(p, own[name]) for name, p in plain.named_parameters() if name in own)
    # A split backward adds the products of the micro-batches to the gradient itself, which some CPUs round differently.
    is_split = options.get("schedule") == "zb_h1"
    assert_bit_equal(found, expected_step(plain, adapters_of(pipe)), tolerance=1e-6 if is_split else 0.0)
    # On a CPU with AVX512-BF16, bitsandbytes changes the form of the weights in evaluation.
    before = pipe.eval_step(batch).loss
    assert_bit_equal(run_pipeline(pipe, batch), found)
    assert pipe.eval_step(batch).loss == before


def test_an_evaluation_leaves_the_form_of_the_weights(
    directories: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    pipe = make(directories[False], "nf4", 2)
    layers = [one for stage in pipe.models.values() for one in quantised.quantised_layers(stage.model)]
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


def _step_on_two_processes(directory: Path) -> tuple[Result, dict[str, torch.Tensor]]:
    pipe = make(directory, "nf4+", 2, schedule="1f1b")
    return run_pipeline(pipe, padded_batch(config())), adapters_of(pipe)


def test_two_gloo_processes(directories: dict[bool, Path]) -> None:
    results = run_gloo(_step_on_two_processes, 2, directories[True])
    expected = expected_step(plain_model(directories[True], "nf4+"), results[0][1])
    for found, _ in results:
        assert_bit_equal(found, expected)


@pytest.mark.parametrize("kind", ["nf4+", "int8"])
def test_quantised_models_in_memory_and_on_disk(kind: str, directories: dict[bool, Path], tmp_path: Path) -> None:
    plain = plain_model(directories[False], kind)
    plain.save_pretrained(tmp_path, max_shard_size="30KB")
    expected = run_pipeline(make(directories[False], kind, 2), padded_batch(config()))
    assert_bit_equal(run_pipeline(make(tmp_path, None, 3), padded_batch(config())), expected)
    assert_bit_equal(run_pipeline(make(plain, None, 3), padded_batch(config())), expected)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_that_was_evaluated_before(kind: str, directories: dict[bool, Path]) -> None:
    plain, ids = plain_model(directories[False], kind), padded_batch(config())["input_ids"][:1]
    with torch.no_grad():
        # A CPU with AVX512-BF16 rounds the scales, and changes the form of the weights.
        logits = plain.eval()(input_ids=ids).logits
    pipe = make(plain, None, 3)
    found = run_pipeline(pipe, padded_batch(config()))
    expected = run_pipeline(make(directories[False], kind, 3), padded_batch(config()))
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=ids).logits, logits, atol=0.05, rtol=0.05)
    assert_bit_equal(run_pipeline(pipe, padded_batch(config())), found)


def test_adapters_are_saved_for_plain_peft(directories: dict[bool, Path], tmp_path: Path) -> None:
    pipe = make(directories[True], "nf4", 2)
    pipe.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain_model(directories[True], "nf4"), tmp_path).train()
    ids = padded_batch(config())["input_ids"][:1]
    with torch.no_grad():
        expected = loaded.base_model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    found = pipe.eval_step({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}).loss
    assert found == pytest.approx(float(-expected.gather(-1, ids[:, 1:, None]).mean()), rel=1e-5)
    other = make(directories[True], "nf4", 3, seed=1)
    other.load_pretrained(tmp_path)
    assert all(torch.equal(p, adapters_of(pipe)[name]) for name, p in adapters_of(other).items())


def test_the_planner_counts_quantised_bytes(directories: dict[bool, Path]) -> None:
    for kind in ("nf4", "fp4+", "int8"):
        pipe = make(directories[False], kind, 2)
        planned = ModelLayers(pipe.adapter).own
        for number, layers in enumerate(pipe.partition):
            sizes = [quantised.size_of_quantised(one) for one in pipe.models[number].model.parameters()]
            assert sum(planned[layer].count for layer in layers) == sum(count for count, _ in sizes)
            assert sum(planned[layer].num_bytes for layer in layers) == sum(size for _, size in sizes)
            trained = sum(p.nbytes for p in pipe.models[number].model.parameters() if p.requires_grad)
            assert sum(planned[layer].trainable_bytes for layer in layers) == trained
        weight = pipe.models[0].model.model.layers[0].mlp.up_proj.base_layer.weight
        # A float32 scale for every 64 weights, or a byte and one for 256 of these; or one for every row.
        scales = {"nf4": 128 * 4, "fp4+": 128 + 4, "int8": 128 * 4}[kind]
        bits = 8 if kind == "int8" else 4
        assert quantised.size_of_quantised(weight) == (64 * 128, 64 * 128 * bits // 8 + scales)


def test_the_planner_runs_quantised_layers_like_those_that_are_not() -> None:
    costs = []
    for given in (None, asked("nf4+")):
        adapter = adapter_for(config(), torch.float32, quantization_config=given)
        resolve_peft(adapter, "default", LORA)
        tracer = LayerTracer(adapter, as_on_gpu=True)
        costs.append(tracer.costs(Workload(1, 4, 4)).layers[2])
    plain, four = costs
    assert four.forward.flops == plain.forward.flops
    assert four.backward.flops == plain.backward.flops
    # Each conversion reads half a byte of a weight, and writes four; norms are not quantised. peft copies each output.
    weights = plain.parameters.count - plain.parameters.trainable_count - 2 * 64
    copies = 2 * 4 * 4 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    assert four.forward.moved - plain.forward.moved == 4.5 * weights + copies
    assert four.plain.saved_bytes == pytest.approx(plain.plain.saved_bytes, rel=0.01)
    # To multiply, one weight at a time is converted back.
    largest = 64 * 128 * 4
    assert plain.forward_working_bytes < four.forward_working_bytes <= plain.forward_working_bytes + largest
    assert plain.plain.backward_working_bytes < four.plain.backward_working_bytes


@pytest.mark.parametrize(("kind", "is_new"), [("nf4", False), ("int8", True)])
def test_a_classifier_s_head_is_trained_beside_a_quantised_base(
    kind: str, is_new: bool, directories: dict[bool, Path], tmp_path: Path
) -> None:
    """The head of a checkpoint, or a new one on a language model's."""
    torch.manual_seed(0)
    directory, overrides = tmp_path, {"num_labels": 3}
    if is_new:
        directory, overrides = directories[False], overrides | {"architectures": ["LlamaForSequenceClassification"]}
    else:
        given = config()
        given.num_labels = 3
        AutoModelForSequenceClassification.from_config(given).save_pretrained(tmp_path)
    common: dict[str, Any] = {"quantization_config": asked(kind), "dtype": torch.float32}
    common["attn_implementation"] = "eager"
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear", init_lora_weights=False)
    batch = {**padded_batch(config()), "labels": torch.tensor([0, 2, 1, 2, 0, 1])}
    pipe = Pipeline(directory, 2, 1, peft_config=lora, config_overrides=overrides, **common)
    found = run_pipeline(pipe, batch)
    plain = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3, **common)
    model = peft.get_peft_model(plain, copy.deepcopy(lora)).train()
    named = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, value in adapters_of(pipe).items():
            named[name].copy_(value)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert "score.modules_to_save.default.weight" in named
    assert not any(".score." in name or name.startswith("score.lora") for name in found.gradients if "lora" in name)
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.gradients.keys() == named.keys()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, named[name].grad, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_quantised_is_refused(
    directories: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directories[False]
    base = Pipeline(directory, 2, 2, quantization_config=asked("nf4"))
    assert base.eval_step(padded_batch(config())).loss > 0
    with pytest.raises(UserError, match=r"quantised and cannot be trained.*peft_config"):
        base.train_step(padded_batch(config()))
    with pytest.raises(UserError, match=r"save_pretrained.*only adapters"):
        base.save_pretrained(tmp_path)
    for given, message in (
        ({"quantization_config": BitsAndBytesConfig()}, "has load_in_4bit and load_in_8bit false"),
        ({"quantization_config": GPTQConfig(bits=4)}, "GPTQConfig; give a transformers.BitsAndBytesConfig"),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)}, "fp16_weight"),
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["x"])}, "head 'lm_head'"),
        ({"quantization_config": asked("nf4"), "dtype": "float64"}, "dtype is float64"),
    ):
        with pytest.raises(UserError, match=message):
            Pipeline(directory, 2, **given)
    with pytest.raises(UnsupportedModelError, match=r"quantised by gptq.*bitsandbytes alone"):
        Pipeline(LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}), 2)
    with pytest.raises(UserError, match="quantised already"):
        Pipeline(LlamaConfig(quantization_config=asked("nf4")), 2, quantization_config=asked("nf4"))
    with pytest.raises(UserError, match="for weights that are read"):
        Pipeline(plain_model(directory, "nf4"), 2, quantization_config=asked("nf4"))
    text = "{model: {config: {model_type: llama}}, data: {kind: cldr, languages: [de]}, training: {output_dir: x}}"
    with pytest.raises(UserError, match="weights of a new model would be lost"):
        check_model(parse_recipe(text, ["lora.r=4"]))
    plain_model(directory, "nf4").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"are quantised, and such weights are not trained; set lora\.r"):
        check_model(parse_recipe(text, [f"model.path={tmp_path}", "model.config={}"]))
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'hf_gpipe\[quantised\]'"):
        Pipeline(directory, 2, quantization_config=asked("nf4"))


@pytest.mark.parametrize("kind", ["nf4", "fp4+", "int8"])
def test_a_weight_is_quantised_slice_by_slice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "_SLICE", 1 << 8)
    weight = torch.randn(37, 72)  # neither blocks nor slices divide it
    layer = bitsandbytes.nn.Linear8bitLt if kind == "int8" else bitsandbytes.nn.Linear4bit
    states = []
    for mode in (contextlib.nullcontext(), quantised.BySlices()):
        with mode:
            module = layer(72, 37, bias=False)
            module.weight.data.copy_(weight)
            quantised.Quantisation(asked(kind)).quantise(module)
            states.append(module.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_training_resumes_on_other_stages(directories: dict[bool, Path], tmp_path: Path) -> None:
    found = []
    for name, num_stages, resumed in (("whole", 2, False), ("whole", 3, True)):
        pipe = make(directories[False], "nf4", num_stages)
        options = {
            "num_stages": num_stages,
            "max_steps": 2,
            "save_strategy": "steps",
            "save_steps": 1,
            "logging_steps": 1,
        }
        made = trainer(tmp_path / name, model=pipe, family="llama", **options)
        made.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-1") if resumed else None)
        found.append(adapters_of(pipe))
    assert found[0].keys() == found[1].keys()
    for name, adapter in found[0].items():
        torch.testing.assert_close(found[1][name], adapter, msg=name)
