"""Models of which a part is frozen: the loss and every gradient are the plain model's, and the same ones have none."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import MarianMTModel, PegasusConfig, PegasusForConditionalGeneration, PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.adapters import Adapter, adapter_for
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.model.clone import Batch, padded_batch
from hf_gpipe.model.reference import MICRO_BATCHES, Step, plain_step
from hf_gpipe.model.trainable import TrainableLayers
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import make_optimizer
from tests import oracle
from tests.adapters.test_families import COMPARED_HERE, DECODER_ONLY, ENCODER_DECODER, TOLERANCE, clone
from tests.gloo import run_gloo
from tests.training.toy import arguments, trainer, weights

PARTS = ("encoder", "decoder", "embeddings", "every second layer", "all but the head")
VARIANTS = ("llama, tied", "gpt2, untied", "m2m_100, untied", "qwen3_moe with auxiliary loss")


def freeze(model: PreTrainedModel, adapter: Adapter, part: str) -> None:
    """Freeze a part of a model of which all else requires a gradient, as of every model that was loaded."""
    model.requires_grad_(True)
    for module in _modules(model, adapter, part):
        module.requires_grad_(False)
    if part == "all but the head":  # it may be tied to what was frozen
        model.get_submodule(adapter.layers[-1].name).requires_grad_(True)


def _modules(model: PreTrainedModel, adapter: Adapter, part: str) -> Iterator[nn.Module]:
    """Without an encoder, "encoder" and "decoder" are the first and the second half of the layers."""
    if part in ("encoder", "decoder") and model.config.is_encoder_decoder:
        yield getattr(model, f"get_{part}")()
        return
    layers = adapter.layers
    half = len(layers) // 2
    chosen = {
        "encoder": layers[:half],
        "decoder": layers[half:],
        "embeddings": [layer for layer in layers if layer.kind == "embedding"],
        "every second layer": layers[1::2],
        "all but the head": layers[:-1],
    }[part]
    for layer in chosen:
        yield from (model.get_submodule(name) for name in layer.modules)


def plain(model: PreTrainedModel, adapter: Adapter, batch: Batch) -> Step:
    expected = plain_step(model, batch, adapter)
    model.zero_grad()
    return expected


def in_stages(pipe: Pipeline, batch: Batch | None) -> Step:
    """A step of the pipeline, with the gradients of all processes."""
    found = oracle.run_pipeline(pipe, batch)
    pipe.zero_grad()
    return Step(found.loss, found.gradients, torch.float64)


def made_anew(pipe: Pipeline) -> Pipeline:
    """A pipeline whose model was frozen since: as if it had been made now, in a tenth of the time."""
    pipe.weights.trainable = TrainableLayers.of(pipe.adapter, pipe.models, pipe.world)
    pipe.stages.update({n: pipe.weights.trainable.stage(own) for n, own in pipe.models.items()})
    return pipe


CASES = [*DECODER_ONLY, *ENCODER_DECODER, *VARIANTS]
#: Of these every split and every part is tried, and of each other family one split and two of the five parts.
THOROUGH = ("llama", "t5")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient(case: str) -> None:
    model = clone(case)
    batch = padded_batch(model)
    blocks = "block" if model.supports_gradient_checkpointing else "none"
    splits = [(2, "none"), (3, "stage"), (4, blocks)]
    number = CASES.index(case)
    chosen = splits if case in THOROUGH else [splits[number % len(splits)]]
    parts = PARTS if case in THOROUGH else [PARTS[(number + turn) % len(PARTS)] for turn in (0, 2)]
    with patch("hf_gpipe.pipeline.probe.verify") if case in COMPARED_HERE else nullcontext():
        pipes = [Pipeline(model, k, MICRO_BATCHES, recompute=how) for k, how in chosen]
    adapter = pipes[0].adapter
    for part in parts:
        freeze(model, adapter, part)
        expected = plain(model, adapter, batch)
        assert 0 < len(expected.gradients) < len(dict(model.named_parameters()))
        for pipe in pipes:
            assert in_stages(made_anew(pipe), batch).difference(expected) <= TOLERANCE, (part, pipe.num_stages)


# ---------------------------------------------------------------------- tables that no gradient reaches


def loaded(family: str, folder: Path) -> PreTrainedModel:
    """A model with 3 + 3 blocks, and with what requires a gradient after `from_pretrained`."""
    sizes: dict[str, Any] = {"encoder_layers": 3, "decoder_layers": 3}
    config = oracle.tiny_config("marian", **sizes)
    cls: type[PreTrainedModel] = MarianMTModel
    if family == "pegasus":
        config, cls = (
            PegasusConfig(**config.to_diff_dict() | {"model_type": "pegasus"}),
            PegasusForConditionalGeneration,
        )
    oracle.plain_model(config).save_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tables = [p for name, p in model.named_parameters() if "embed_positions" in name]
    assert len(tables) == 2
    assert all(table.requires_grad for table in tables), "once this fails the library keeps them frozen"
    return model.train()


#: Since transformers 5.24 tables of sines that were read from files are trained; the plain model has their gradients.
TRAINS_SINES = Version(transformers.__version__) >= Version("5.24")
keeps_sines = pytest.mark.skipif(TRAINS_SINES, reason="transformers 5.24 trains tables of sines that were read")


@pytest.mark.parametrize("family", ["marian", "pegasus"])
def test_a_table_of_sines_that_requires_a_gradient_gets_that_of_the_plain_model(family: str, tmp_path: Path) -> None:
    """It made its layer count as trained, and a stage without anything else to train failed in its backward."""
    model = loaded(family, tmp_path)
    batch, adapter = oracle.padded_batch(model.config), Pipeline(model, 1).adapter
    for part in ("encoder", "embeddings"):
        freeze(model, adapter, part)
        expected = oracle.run_plain(model, batch, 2)
        for num_stages in (2, 4):
            model.zero_grad()
            pipe = Pipeline(model, num_stages, 2)
            oracle.assert_same(oracle.run_pipeline(pipe, batch), expected)
            first = pipe.stages[0]
            is_needed = part == "embeddings" or TRAINS_SINES
            assert not any(first.trainable_outputs.values()) or is_needed, "nobody needs this gradient"


@keeps_sines
def test_it_is_not_decayed_either(tmp_path: Path) -> None:
    """Plain AdamW passes over what has no gradient."""
    model = loaded("marian", tmp_path)
    freeze(model, Pipeline(model, 1).adapter, "encoder")
    batch, reference = oracle.padded_batch(model.config), copy.deepcopy(model)
    tables = {name: p.detach().clone() for name, p in model.named_parameters() if "embed_positions" in name}
    pipe = Pipeline(model, 2, 2)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5) for one in (reference, pipe)]
    for _ in range(2):
        expected = oracle.run_plain(reference, batch, 2)
        oracle.assert_same(oracle.run_pipeline(pipe, batch), expected, tolerance=1e-8)
        for optimizer in optimizers:
            optimizer.step()
    for name, table in tables.items():
        assert torch.equal(model.get_parameter(name), table)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-6, atol=1e-8)


@keeps_sines
def test_nor_are_its_float32_copies(tmp_path: Path) -> None:
    model = loaded("marian", tmp_path).bfloat16()
    tables = {name: p.detach().clone() for name, p in model.named_parameters() if "embed_positions" in name}
    pipe = Pipeline(model, 2, 2)
    copies = MasterWeights(dict(pipe.named_parameters()))
    assert tables.keys() <= copies.copies.keys()
    optimizer = make_optimizer(pipe, arguments(tmp_path, weight_decay=0.5), master_weights=copies)
    pipe.train_step(oracle.padded_batch(model.config))
    optimizer.step()
    for name, table in tables.items():
        assert torch.equal(model.get_parameter(name), table)
        assert torch.equal(copies.copies[name], table.float())


def test_a_training_resumes_with_parts_frozen(tmp_path: Path) -> None:
    """A parameter without a gradient has no state in the optimizer, and one stage has nothing to train at all."""
    model = loaded("marian", tmp_path / "model").float()
    freeze(model, Pipeline(model, 1).adapter, "encoder")
    again = copy.deepcopy(model)
    options: dict[str, Any] = {"num_stages": 4, "lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "a", model=copy.deepcopy(model), max_steps=4, **options)
    whole.train()
    trainer(tmp_path / "b", model=model, max_steps=2, save_strategy="steps", save_steps=2, **options).train()
    other = trainer(tmp_path / "b", model=again, max_steps=4, **options)
    other.train(resume_from_checkpoint=True)
    expected = weights(whole)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(tensor, expected[name])


# ---------------------------------------------------------------------- what a rule cannot know


def only_indexers(model: PreTrainedModel) -> None:
    """Train of the first blocks what chooses positions, which has no gradient, and all of the last block."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name or "layers.3." in name)


def test_a_block_that_is_trained_without_effect() -> None:
    """The gradient that was agreed on is sent, and changes nothing where it arrives."""
    model = clone("deepseek_v32")
    only_indexers(model)
    batch = padded_batch(model)
    for num_stages, recompute in ((2, "none"), (3, "stage"), (4, "block")):
        pipe = Pipeline(model, num_stages, MICRO_BATCHES, recompute=recompute)
        expected = plain(model, pipe.adapter, batch)
        assert not any(".indexer." in name for name in expected.gradients if "layers.3." not in name)
        assert pipe.stages[0].trainable_outputs == {"hidden": True}
        assert in_stages(pipe, batch).difference(expected) <= TOLERANCE


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_a_gradient_that_nobody_agreed_on_is_an_error(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be lost without a word."""
    model = clone("llama")
    monkeypatch.setattr(Adapter, "is_trained", lambda adapter, layer, model: layer.kind == "head")
    with pytest.raises(StageError, match="hidden depends on a trained parameter, and no gradient was agreed on"):
        Pipeline(model, 2, 2, recompute=recompute).train_step(padded_batch(model))


@pytest.mark.parametrize("is_all", [True, pytest.param(False, marks=keeps_sines)])
def test_nothing_to_train(is_all: bool, tmp_path: Path) -> None:
    """A step fails as the plain model's does; evaluation and generation need no gradient."""
    model = loaded("marian", tmp_path)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_all and "embed_positions" in name)
    batch = oracle.padded_batch(model.config)
    with pytest.raises(RuntimeError, match="does not require grad"):
        oracle.run_plain(model, batch, 2)
    pipe = Pipeline(model, 2, 2)
    with pytest.raises(UserError, match="there is nothing to train; unfreeze some of them"):
        pipe.train_step(batch)
    assert pipe.eval_step(batch).loss > 0
    assert pipe.generate(input_ids=batch["input_ids"][:1], max_new_tokens=2).shape[0] == 1


# ---------------------------------------------------------------------- PEFT, whatever the model comes from


def test_adapters_on_loaded_and_on_new_models(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "layers_pattern": "layers"}
    lora = peft.LoraConfig(**options, layers_to_transform=[2], init_lora_weights=False)
    model = loaded("marian", tmp_path)
    batch = oracle.padded_batch(model.config)
    for source in (tmp_path, model.config):
        arguments: dict[str, Any] = {"dtype": "float64", "attn_implementation": "eager", "peft_config": lora}
        one = Pipeline(source, 1, 2, **arguments)
        expected = oracle.run_pipeline(one, batch)
        assert expected.gradients
        assert all("lora_" in name for name in expected.gradients)
        for num_stages in (2, 4):
            pipe = Pipeline(source, num_stages, 2, **arguments)
            oracle.assert_same(oracle.run_pipeline(pipe, batch), expected)
            # Of two stages the first has adapters.
            assert any(pipe.stages[0].trainable_outputs.values()) == (num_stages == 2)
        if source is tmp_path:
            reference = peft.get_peft_model(copy.deepcopy(model), lora).get_base_model()
            reference.load_state_dict(dict(one.named_parameters()), strict=False)
            oracle.assert_same(expected, oracle.run_plain(reference.double(), batch, 2))


# ---------------------------------------------------------------------- several processes

PROCESSES = [
    ("marian", "encoder", 2),
    ("marian", "embeddings", 4),
    ("gpt2", "every second layer", 4),
    ("t5", "all but the head", 2),
]


def _on_two_processes() -> list[Step]:
    steps = []
    for case, part, num_stages in PROCESSES:
        model = clone(case)
        freeze(model, adapter_for(model.config, model.dtype, "eager"), part)
        steps.append(in_stages(Pipeline(model, num_stages, MICRO_BATCHES), padded_batch(model)))
    model = clone("deepseek_v32")
    only_indexers(model)
    steps.append(in_stages(Pipeline(model, 4, MICRO_BATCHES), padded_batch(model)))
    model.requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        Pipeline(model, 2).train_step(padded_batch(model))
    return steps


def test_two_gloo_processes() -> None:
    expected = []
    for case, part, _ in PROCESSES:
        model = clone(case)
        adapter = Pipeline(model, 1).adapter
        freeze(model, adapter, part)
        expected.append(plain(model, adapter, padded_batch(model)))
    model = clone("deepseek_v32")
    only_indexers(model)
    expected.append(plain(model, Pipeline(model, 1).adapter, padded_batch(model)))
    for steps in run_gloo(_on_two_processes, 2):
        for found, wanted in zip(steps, expected, strict=True):
            assert found.difference(wanted) <= TOLERANCE
