"""LoRA on stages: the same training as plain transformers with peft, saved in PEFT's format."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_gpipe import Pipeline
from hf_gpipe.errors import CheckpointError, UnsupportedModelError, UserError
from tests.gloo import run_gloo
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

peft = pytest.importorskip("peft")


def lora(**options: object) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)


def adapted_model(seed: int = 0) -> peft.PeftModel:
    """A tiny llama with LoRA whose second factors are not zero, so that both get gradients."""
    model = peft.get_peft_model(plain_model(tiny_config("llama"), seed), lora()).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def test_fine_tuning_equals_plain_peft() -> None:
    reference = adapted_model()
    plain = copy.deepcopy(reference).get_base_model()
    batch = padded_batch(plain.config)
    pipe = Pipeline(reference, 2, 3)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05) for model in (plain, pipe)
    ]
    for _ in range(3):
        expected = run_plain(plain, batch, 3)
        found = run_pipeline(pipe, batch)
        assert all("lora_" in name for name in expected.gradients)
        assert_same(found, expected, tolerance=1e-9)
        for optimizer in optimizers:
            optimizer.step()


def test_a_wholly_frozen_stage_receives_no_gradient() -> None:
    reference = adapted_model()
    for name, parameter in reference.named_parameters():
        if "layers.0." in name:
            parameter.requires_grad_(False)
    plain = copy.deepcopy(reference).get_base_model()
    batch = padded_batch(plain.config)
    pipe = Pipeline(reference, 2, 2, partition=[2, 4])
    sent: list[int] = []
    pipe.forwards.edges[0, 0, 0].up.send = lambda *message: sent.append(message[0])
    assert_same(run_pipeline(pipe, batch), run_plain(plain, batch, 2))
    assert not sent
    assert pipe.stages[1].trainable_inputs == {"hidden": False}


def test_new_adapters_do_not_depend_on_the_split() -> None:
    plain = plain_model(tiny_config("llama"), dtype=torch.float32)
    pipes = [Pipeline(plain.config, k, peft_config=lora(), seed=3) for k in (1, 2, 6)]
    expected = dict(pipes[0].named_parameters())
    assert any("lora_A" in name for name in expected)
    for pipe in pipes:
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, expected[name]), name
            assert parameter.requires_grad == ("lora_" in name)


def test_new_adapters_on_a_model_in_memory() -> None:
    plain = plain_model(tiny_config("llama"))
    batch = padded_batch(plain.config)
    expected = run_plain(copy.deepcopy(plain), batch, 2).loss
    pipe = Pipeline(plain, 2, 2, peft_config=lora())
    found = run_pipeline(pipe, batch)
    assert found.loss == pytest.approx(expected, rel=1e-10), "new adapters change nothing yet"
    assert found.gradients
    assert all("lora_" in name for name in found.gradients)


def test_adapters_are_saved_in_the_format_of_peft(tmp_path: Path) -> None:
    reference = adapted_model()
    reference.save_pretrained(tmp_path / "plain")
    pipe = Pipeline(reference, 3)
    pipe.save_pretrained(tmp_path / "pipeline")
    found, expected = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("pipeline", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loaded = peft.PeftModel.from_pretrained(plain_model(tiny_config("llama")), tmp_path / "pipeline")
    batch = padded_batch(tiny_config("llama"))
    with torch.no_grad():
        ids = {"input_ids": batch["input_ids"][:1]}
        torch.testing.assert_close(loaded.double()(**ids).logits, reference(**ids).logits)


def test_saved_adapters_are_read_back(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("llama"), 3, peft_config=lora(), seed=1)
    pipe.save_pretrained(tmp_path)
    other = Pipeline(tiny_config("llama"), 2, peft_config=lora(), seed=2)
    other.load_pretrained(tmp_path)
    expected = {name: p for name, p in pipe.named_parameters() if "lora_" in name}
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, expected[name])
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        other.load_pretrained(tmp_path)


def test_what_cannot_be_split_is_refused() -> None:
    config = tiny_config("llama")
    with pytest.raises(UnsupportedModelError, match="nothing_like_it"):
        Pipeline(config, 2, peft_config=peft.LoraConfig(target_modules=["nothing_like_it"]))
    with pytest.raises(UserError, match="already has PEFT"):
        Pipeline(adapted_model(), 2, peft_config=lora())


def _fine_tune_on_two_processes() -> dict[str, torch.Tensor]:
    reference = adapted_model()
    return run_pipeline(Pipeline(reference, 2, 2), padded_batch(tiny_config("llama"))).gradients


def test_two_gloo_processes() -> None:
    plain = adapted_model().get_base_model()
    expected = run_plain(plain, padded_batch(plain.config), 2)
    for gradients in run_gloo(_fine_tune_on_two_processes, 2):
        assert gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(gradients[name], gradient)
