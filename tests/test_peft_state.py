"""Models that have PEFT adapters: their state is kept or named, and saved adapters are trained on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaForCausalLM

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.errors import CheckpointError, RecipeError, UnsupportedModelError, UserError
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.model.merging import merge
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.recipe import load_recipe
from hf_gpipe.train import main
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
from tests.test_peft import adapted_model, lora
from tests.training.toy import CausalRows, arguments

peft = pytest.importorskip("peft")


def scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 5.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.merge_adapter(), r"q_proj are merged into its weights.*call unmerge_adapter\(\)"),
        (lambda model: model.base_model.disable_adapter_layers(), r"are turned off.*call enable_adapter_layers\(\)"),
        (scale, r"has scaling=\{'default': 10.0\} and stages made by its config"),
    ],
)
def test_a_state_that_stages_would_not_have(change: Callable[[Any], Any], message: str) -> None:
    """Merged adapters were added twice, disabled ones were used, and another scale was forgotten."""
    model = adapted_model()
    change(model)
    for given in (model, model.get_base_model()):
        with pytest.raises(UserError, match=message):
            Pipeline(given, 2, 2)


def test_prompt_learning_on_a_given_model() -> None:
    """The prompt was dropped, and the base model was trained."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(plain_model(tiny_config("llama")), config)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(UnsupportedModelError, match="PROMPT_TUNING is not supported: prompt learning changes what"):
        Pipeline(model, 2, 2)


@pytest.mark.parametrize(
    "options",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_dora": True}, {"use_rslora": True}],
    ids=str,
)
def test_adapters_that_peft_has_made(options: dict[str, Any]) -> None:
    """Adapters with initial values from the weights failed with an error of torch about tensors without memory."""
    reference = peft.get_peft_model(plain_model(tiny_config("llama"), dtype=torch.float32), lora(**options)).double()
    plain = copy.deepcopy(reference).get_base_model()
    batch = padded_batch(plain.config)
    expected = run_plain(plain, batch, 3)
    assert_same(run_pipeline(Pipeline(reference, 3, 3, "zb_h1", "none"), batch), expected)


@pytest.mark.parametrize("start", ["eva", "corda", "pissa_quickly"])
def test_initial_values_that_stages_cannot_compute_are_named(start: str) -> None:
    config = lora()
    config.init_lora_weights = start
    with pytest.raises(UnsupportedModelError, match=f"init_lora_weights='{start}' is not supported.*get_peft_model"):
        Pipeline(plain_model(tiny_config("llama")), 2, 2, peft_config=config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and one with adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = adapted_model()
    model.get_base_model().config.name_or_path = str(folder / "base")
    LlamaForCausalLM(tiny_config("llama"))
    plain_model(tiny_config("llama")).save_pretrained(folder / "base")
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapters")
    return folder


def expected_of(saved: Path) -> tuple[Result, Any]:
    base = LlamaForCausalLM.from_pretrained(saved / "base", dtype=torch.float64, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, saved / "adapters", is_trainable=True).double().train()
    return run_plain(model.get_base_model(), padded_batch(base.config), 2), model


@pytest.mark.parametrize("num_stages", [1, 3])
def test_saved_adapters_are_trained_on(num_stages: int, saved: Path, tmp_path: Path) -> None:
    """The directory of adapters was no model: "Unrecognized model"."""
    expected, plain = expected_of(saved)
    pipe = Pipeline(saved / "adapters", num_stages, 2, dtype="float64", attn_implementation="eager")
    assert not pipe.has_new_adapters
    # peft keeps adapters in float32.
    assert_same(run_pipeline(pipe, padded_batch(plain.config)), expected, 1e-6)
    pipe.save_pretrained(tmp_path / "mine")
    written = [load_file(folder / "adapter_model.safetensors") for folder in (saved / "adapters", tmp_path / "mine")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name].to(tensor)) for name, tensor in written[0].items())


def gradients_of(folder: Path) -> Result:
    pipe = Pipeline(folder / "adapters", 2, 2, dtype="float64", attn_implementation="eager")
    return run_pipeline(pipe, padded_batch(tiny_config("llama")) if pipe.world.is_main else None)


def test_saved_adapters_in_two_processes(saved: Path) -> None:
    expected, _ = expected_of(saved)
    for found in run_gloo(gradients_of, 2, saved):
        assert_same(found, expected, 1e-6)


def test_what_is_wrong_with_saved_adapters(saved: Path, tmp_path: Path) -> None:
    def copied(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        values = json.loads((saved / "adapters/adapter_config.json").read_text()) | changes
        (folder / "adapter_config.json").write_text(json.dumps(values))
        return folder

    with pytest.raises(UserError, match="has saved adapters already; leave peft_config out"):
        Pipeline(saved / "adapters", 2, peft_config=lora())
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors; save"):
        Pipeline(copied("empty"), 2)
    no_base = copied("no base", base_model_name_or_path=None)
    shutil.copy(saved / "adapters/adapter_model.safetensors", no_base)
    with pytest.raises(CheckpointError, match="has no base_model_name_or_path"):
        Pipeline(no_base, 2)
    with pytest.raises(CheckpointError, match="cannot read the adapters' configuration"):
        Pipeline(copied("no method", peft_type="SOMETHING"), 2)
    lacking = copied("lacking")
    tensors = load_file(saved / "adapters/adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), lacking / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 'base_model\.model"):
        Pipeline(lacking, 2)
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, lacking / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has the type I8, expected floating-point numbers"):
        Pipeline(lacking, 2)
    recipe = tmp_path / "recipe.yaml"
    sections = {
        "data": {"kind": "cldr", "languages": ["de"]},
        "model": {"path": str(saved / "adapters")},
        "training": {"output_dir": str(tmp_path / "out")},
    }
    recipe.write_text(json.dumps(sections))
    with pytest.raises(RecipeError, match=r"has PEFT adapters and no model; give the model.*as lora.path"):
        model_config(load_recipe(recipe), None)


def test_a_recipe_trains_whole_modules_and_trains_saved_adapters_on(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = tiny_config("llama")
    config.vocab_size = 320
    LlamaForCausalLM(config).save_pretrained(base)
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "text.txt").write_text("".join(f"line {number} of the text\n\n" for number in range(60)))
    sections = {
        "model": {"path": str(base)},
        "data": {"kind": "text", "path": str(tmp_path / "text.txt"), "max_target_tokens": 16, "test_fraction": 0.2},
        "tokenizer": {"vocab_size": 280},
        "pipeline": {"num_stages": 2, "num_micro_batches": 2, "num_processes": 1, "device": "cpu"}
        | {"schedule": "gpipe", "partition": "count", "recompute": "stage"},
        "training": {"output_dir": str(tmp_path / "first"), "max_steps": 2, "batch_size": 4},
    }
    recipe.write_text(json.dumps(sections))
    assert main([str(recipe), "lora.r=2", "lora.modules_to_save=[embed_tokens]"]) == 0
    adapters = tmp_path / "first"
    words = [str(recipe), f"lora.path={adapters}", f"training.output_dir={tmp_path / 'second'}"]
    assert main([*words, "training.max_steps=1", "training.learning_rate=0.0"]) == 0
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "second", adapters))
    assert any("modules_to_save" in name or "embed_tokens" in name for name in expected)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(RecipeError, match=r"there is no adapter_config\.json in"):
        check_model(load_recipe(recipe, [f"lora.path={base}"]))
    for key in ("target_modules", "modules_to_save"):  # peft passes over a name that no module has
        with pytest.raises(RecipeError, match=rf"lora\.{key} has 'q_prj', and .* did you mean 'q_proj'"):
            check_model(load_recipe(recipe, ["lora.r=2", f"lora.{key}=[v_proj, q_prj]"]))
    with pytest.raises(RecipeError, match=r"lora\.target_modules has '_proj'"):  # a target is a whole name
        check_model(load_recipe(recipe, ["lora.r=2", "lora.target_modules=[v_proj, _proj]"]))


def test_a_trainer_adds_adapters(saved: Path, tmp_path: Path) -> None:
    """`peft_config` was an unexpected keyword argument."""
    common: dict[str, Any] = {"train_dataset": CausalRows(8), "data_collator": None}
    args = arguments(tmp_path, max_steps=2, num_micro_batches=2, seed=3)
    made = PipelineTrainer(str(saved / "base"), args, **common, peft_config=lora())
    assert made.pipe.has_new_adapters
    assert all("lora_" in name for name, p in made.pipe.named_parameters() if p.requires_grad)
    with pytest.raises(UserError, match="peft_config is given, and the model is a Pipeline"):
        PipelineTrainer(made.pipe, args, **common, peft_config=lora())
    assert not PipelineTrainer(str(saved / "adapters"), args, **common).pipe.has_new_adapters


def test_adapters_and_a_whole_model_replace_each_other(saved: Path, tmp_path: Path) -> None:
    """The adapter_config.json of an earlier run stayed, and base and old adapters were read, never the new weights."""
    whole = Pipeline(plain_model(tiny_config("llama"), 1, torch.float32), 2)
    adapters = Pipeline(saved / "base", 2, peft_config=lora(), dtype=torch.float32)
    for pipe in (adapters, whole, adapters):
        pipe.save_pretrained(tmp_path)
        weights = {name: p for name, p in pipe.named_parameters() if p.requires_grad}
        again = dict(Pipeline(tmp_path, 2, dtype=torch.float32).named_parameters())
        plain = dict(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
        for name, weight in weights.items():
            assert torch.equal(again[name], weight), name
            assert torch.equal(plain[name], weight), name
        assert (tmp_path / "model.safetensors.index.json").exists() == (pipe is whole)
    # Those that peft has saved, without digests.
    (tmp_path / "hf_gpipe_digests.json").unlink()
    whole.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("adapter*"))


def test_adapters_are_saved_beside_their_model(saved: Path, tmp_path: Path) -> None:
    """What an earlier save has left is deleted, and not the model that the adapters belong to."""
    Pipeline(saved / "base", 2).save_pretrained(tmp_path)
    Pipeline(tmp_path, 2, peft_config=lora()).save_pretrained(tmp_path)
    assert {"model.safetensors.index.json", "adapter_model.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    Pipeline(tmp_path, 2)


def test_a_compiled_model_with_adapters() -> None:
    """It was trained without being compiled, where a compiled model without adapters is an error."""
    for model in (plain_model(tiny_config("llama")), adapted_model()):
        with pytest.raises(UserError, match=r"was compiled by torch.compile, .*set torch_compile=True"):
            Pipeline(torch.compile(model), 2)


def test_the_model_as_peft_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trainer's model had neither the names of peft's model, nor its class and most of its methods."""
    plain = adapted_model()
    plain.print_trainable_parameters()
    expected, pipe = capsys.readouterr().out, Pipeline(copy.deepcopy(plain), 2)
    model = pipe.peft_model
    model.print_trainable_parameters()
    assert capsys.readouterr().out == expected
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    assert isinstance(model, type(plain))
    assert model.get_base_model() is pipe.model
    assert repr(model) == repr(plain)
    tensors = plain.state_dict()
    assert model.state_dict().keys() == tensors.keys()
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)
        assert model.get_parameter(name).requires_grad == parameter.requires_grad
    ids = torch.arange(3, 9)[None]
    logits = model.eval()(ids).logits
    assert torch.equal(logits, plain.eval()(ids).logits)
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    merged = plain.merge_and_unload()(ids).logits
    for same in (model, copy.deepcopy(model)):
        assert torch.equal(same.merge_and_unload()(ids).logits, merged)
    assert torch.equal(model(ids).logits, logits)
    model.generation_config = GenerationConfig(max_length=7)
    model.save_pretrained(tmp_path)
    assert pipe.model.generation_config.max_length == 7
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with pytest.raises(UserError, match=r"add_adapter is not supported by a pipeline's model; change the model before"):
        model.add_adapter("other", lora())
    assert Pipeline(tiny_config("llama"), 2).peft_model.__class__.__mro__[2] is LlamaForCausalLM


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_on_an_extended_vocabulary(tied: bool, tmp_path: Path) -> None:
    """The embedding and the head that peft saves with them were ignored, or an error of `merge`."""
    plain_model(tiny_config("llama", tied=tied)).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    wrapped = peft.get_peft_model(model, lora(init_lora_weights=False)).double()
    wrapped.save_pretrained(tmp_path / "adapters")
    batch = padded_batch(model.config)
    batch["input_ids"][0, 0] = batch["labels"][0, 0] = VOCABULARY + 2
    expected = run_plain(model.train(), batch, 2)
    pipe = Pipeline(tmp_path / "adapters", 2, 2, attn_implementation="eager")
    assert_same(run_pipeline(pipe, batch), expected)
    pipe.save_pretrained(tmp_path / "again")
    assert_same(run_pipeline(Pipeline(tmp_path / "again", 1, 2, attn_implementation="eager"), batch), expected)
    if not tied:  # merged, adapters on a tied head would change both of its uses
        merge(ModelSpec.of(tmp_path / "adapters"), tmp_path / "merged")
        merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").train()
        assert abs(run_plain(merged, batch, 2).loss - expected.loss) < 1e-10
