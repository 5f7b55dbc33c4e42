"""Every family that the README promises: exact in stages, on several processes, and in and out of Hub format."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.families import EXACT, REFUSED
from hf_gpipe.model.clone import Batch, exact_clone, padded_batch
from hf_gpipe.model.reference import MICRO_BATCHES, Step, plain_step
from scripts.families import architectures, default_config
from tests.checkpoint.test_round_trips import FAMILIES
from tests.gloo import run_gloo

DECODER_ONLY = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gpt2", "gptj"),
    *("gpt_neo", "gpt_neox", "opt", "bloom", "falcon", "mixtral", "olmo", "olmo2", "phi", "phi3", "starcoder2"),
    *("stablelm", "gpt_oss", "smollm3", "granite", "cohere", "cohere2", "glm4", "nemotron", "deepseek_v2"),
    "deepseek_v3",
)
ENCODER_DECODER = (
    *("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "m2m_100", "nllb-moe", "marian"),
    *("pegasus", "blenderbot", "t5gemma"),
)
#: In mini-batches with images.
IMAGE_TEXT = (
    *("aya_vision", "idefics3", "internvl", "llava", "paligemma", "qwen2_5_vl", "qwen2_vl", "smolvlm", "vipllava"),
)
#: The same family with another switch of its configuration, where that changes what crosses stages or their ties.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with alibi": ("falcon", {"alibi": True}),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "opt with projections": ("opt", {"word_embed_proj_dim": 16}),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu"}),
    "longt5, global": ("longt5", {"encoder_attention_type": "transient-global"}),
    "m2m_100, untied": ("m2m_100", {"tie_word_embeddings": False}),
    "mixtral with auxiliary loss": ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "qwen3_moe with auxiliary loss": ("qwen3_moe", {"output_router_logits": True, "mlp_only_layers": [1]}),
    "gpt_oss with auxiliary loss": ("gpt_oss", {"output_router_logits": True}),
}
CASES = [*DECODER_ONLY, *ENCODER_DECODER, *IMAGE_TEXT, *VARIANTS]
#: All but the first three, of which the comparison of the clone must be right too.
COMPARED_HERE = tuple(VARIANTS)[3:]


PROCESSES = ("llama", "gpt2", "gemma3", "qwen2_vl", "mixtral with auxiliary loss", "t5", "m2m_100")
TOLERANCE = 1e-10


def clone(case: str) -> PreTrainedModel:
    """A tiny model in float64 with random weights everywhere."""
    family, changes = VARIANTS.get(case, (case, {}))
    config = default_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return exact_clone(config, torch.float64)


def in_stages(pipe: Pipeline, batch: Batch) -> Step:
    """One step of a pipeline, with the gradients of all processes."""
    loss = float(pipe.train_step(batch))
    mine = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    gradients: dict[str, torch.Tensor] = {}
    for part in pipe.world.gather_objects(mine):
        assert not gradients.keys() & part.keys(), "a parameter has two owners"
        gradients |= part
    return Step(loss, gradients, torch.float64)


@cache
def in_pieces(case: str) -> tuple[PreTrainedModel, Pipeline]:
    """A clone, and a pipeline of it with a stage for each layer. No test changes the weights.

    Stages of several layers, and each recomputation of every family, have tests/test_freezing.py.
    """
    model = clone(case)
    every_second = CASES.index(case) % 2
    recompute = "block" if every_second and model.supports_gradient_checkpointing else "stage"
    # A variant is compared by the tests here, and its clone, which `Pipeline` would compare, is the same.
    with patch("hf_gpipe.pipeline.probe.verify") if case in COMPARED_HERE else nullcontext():
        return model, Pipeline(model, num_layers(model), MICRO_BATCHES, recompute=recompute)


def num_layers(model: PreTrainedModel) -> int:
    return len(adapter_for(model.config, model.dtype, "eager").layers)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient(case: str) -> None:
    """Several micro-batches are in flight while blocks are recomputed, which must not see each other's tensors."""
    model, pipe = in_pieces(case)
    batch = padded_batch(model)
    expected = plain_step(model, batch, pipe.adapter)
    pipe.zero_grad()
    assert in_stages(pipe, batch).difference(expected) <= TOLERANCE


@pytest.mark.parametrize("case", [one for one in (*DECODER_ONLY, *ENCODER_DECODER, *IMAGE_TEXT) if one not in FAMILIES])
def test_hub_round_trip(case: str, tmp_path: Path) -> None:
    """Those of tests/checkpoint/test_round_trips.py aside."""
    model, pipe = in_pieces(case)
    model.save_pretrained(tmp_path / "plain")
    pipe.save_pretrained(tmp_path / "stages")
    plain, stages = (tensors_of(tmp_path / name) for name in ("plain", "stages"))
    assert plain.keys() == stages.keys()
    assert all(torch.equal(tensor, stages[name]) for name, tensor in plain.items())
    again, info = type(model).from_pretrained(tmp_path / "stages", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    read = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, read[name]), name
    loaded = Pipeline(tmp_path / "stages", 2)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _on_processes() -> list[Step]:
    models = [clone(case) for case in PROCESSES]
    return [in_stages(Pipeline(one, 3, MICRO_BATCHES, recompute="stage"), padded_batch(one)) for one in models]


def test_three_gloo_processes() -> None:
    results = run_gloo(_on_processes, 3)
    for i, case in enumerate(PROCESSES):
        model = clone(case)
        expected = plain_step(model, padded_batch(model), adapter_for(model.config, model.dtype))
        for steps in results:
            assert steps[i].difference(expected) <= TOLERANCE, case


def test_the_lists_of_families() -> None:
    known = architectures()
    assert set(DECODER_ONLY) | set(ENCODER_DECODER) <= EXACT
    assert not EXACT & REFUSED.keys()
    # An older transformers lacks the newest families.
    for listed in (EXACT, REFUSED):
        assert sum(name in known for name in listed) > 0.9 * len(listed)
