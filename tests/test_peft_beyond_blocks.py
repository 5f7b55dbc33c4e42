"""LoRA beyond the blocks: embeddings, heads and norms as targets, as whole modules, and as single rows of tokens."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_gpipe import Pipeline
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.model.clone import padded_batch as any_batch
from hf_gpipe.model.reference import plain_step
from tests.adapters.test_families import clone
from tests.gloo import run_gloo
from tests.oracle import Result, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

peft = pytest.importorskip("peft")
BLOCKS = ["q_proj", "v_proj"]

CASES: dict[str, dict[str, Any]] = {
    "targets": {"target_modules": [*BLOCKS, "embed_tokens", "lm_head"]},
    "embedding alone": {"target_modules": ["embed_tokens"]},
    "head alone": {"target_modules": ["lm_head"]},
    "dora on the embedding": {"target_modules": [*BLOCKS, "embed_tokens"], "use_dora": True},
    "whole modules": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "norms": {"modules_to_save": ["norm"]},
    "tied copies": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": [3, 5, 9]},
    "other tokens in the head": {"trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [4, 6, 7]}},
    "biases of one block": {"bias": "all", "layers_to_transform": [1]},
}


def adapted(case: str, *, tied: bool, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny llama with adapters that are not as they begin."""
    config = tiny_config("llama", tied=tied, attention_bias=True)
    options = {"target_modules": BLOCKS} | CASES[case]
    base = plain_model(config, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, **options)).to(dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_every_gradient(case: str, tied: bool) -> None:
    reference = adapted(case, tied=tied)
    plain = copy.deepcopy(reference).get_base_model()
    batch = padded_batch(plain.config)
    expected = run_plain(plain, batch, 3)
    splits = (3, "1f1b", "block"), (4, "zb_h1", "none"), (1, "gpipe", "none")
    num_stages, schedule, recompute = splits[(list(CASES).index(case) + tied) % len(splits)]
    pipe = Pipeline(copy.deepcopy(reference), num_stages, 3, schedule, recompute)
    assert_same(run_pipeline(pipe, batch), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_saved_adapters_are_those_that_peft_saves_and_reads(case: str, tied: bool, tmp_path: Path) -> None:
    reference = adapted(case, tied=tied, dtype=torch.float32)
    Pipeline(copy.deepcopy(reference), 3).save_pretrained(tmp_path / "mine")
    reference.save_pretrained(tmp_path / "plain")
    found, wanted = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("mine", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    fresh = plain_model(tiny_config("llama", tied=tied, attention_bias=True), dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path / "mine")
    expected = dict(reference.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("case", ["t5", "gpt2", "gpt2, untied", "m2m_100", "gemma2"])
def test_other_families(case: str, tmp_path: Path) -> None:
    """Trained tokens of an encoder-decoder are one tensor in several modules; GPT-2's blocks have Conv1D."""
    base = clone(case)
    linears = ["q", "v"] if case == "t5" else ["c_attn"] if case.startswith("gpt2") else BLOCKS
    given: list[dict[str, Any]] = [{"trainable_token_indices": [4, 5, 9]}]
    if not base.config.is_encoder_decoder:
        embedding = "wte" if case.startswith("gpt2") else "embed_tokens"
        given += [{"target_modules": [*linears, embedding]}, {"modules_to_save": [embedding]}]
    for options in given:
        config = peft.LoraConfig(r=2, lora_alpha=4, **{"target_modules": linears} | options)
        reference = peft.get_peft_model(copy.deepcopy(base), config).double()
        pipe = Pipeline(copy.deepcopy(reference), 3, 3)
        plain = reference.get_base_model()
        expected = plain_step(plain, any_batch(base), pipe.adapter)
        found = run_pipeline(pipe, any_batch(base))
        assert_same(found, Result(expected.loss, dict(expected.gradients)), 1e-9)
        pipe.save_pretrained(tmp_path / "mine")
        reference.save_pretrained(tmp_path / "plain")
        saved, wanted = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("mine", "plain"))
        assert saved.keys() == wanted.keys()


def test_a_trained_head_is_made_in_parts() -> None:
    """Its copy is a linear layer like the original, which computes where the adapters are turned off."""
    reference = adapted("whole modules", tied=False)
    pipe = Pipeline(copy.deepcopy(reference), 2, 2)
    assert pipe.adapter.projection.names == ("lm_head.modules_to_save.default", "lm_head.original_module")
    batch = padded_batch(reference.config)
    with torch.no_grad():
        for is_on in (True, False):
            found = pipe.log_probs(batch, with_adapters=is_on)
            with nullcontext() if is_on else reference.disable_adapter():
                logits = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            losses = logits[:, :-1].log_softmax(-1).gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0]
            torch.testing.assert_close(found, losses.masked_fill(batch["labels"][:, 1:] < 0, 0.0).sum(1))
    assert all(
        parameter.requires_grad == ("lora" in name or "_to_save" in name) for name, parameter in pipe.named_parameters()
    )
    assert Pipeline(adapted("targets", tied=False), 2, 2).adapter.projection.reason == "its head has PEFT adapters"


def _gradients_of(case: str) -> Result:
    model = adapted(case, tied=True)
    pipe = Pipeline(model, 2, 2)
    return run_pipeline(pipe, padded_batch(model.config) if pipe.world.is_main else None)


def _tokens_and_copies() -> list[Result]:
    return [_gradients_of(case) for case in ("tokens", "tied copies", "targets")]


def test_two_processes_sum_the_gradients_of_what_they_share() -> None:
    """The same trained tokens are in the first stage's embedding and in the last stage's head."""
    expected = []
    for case in ("tokens", "tied copies", "targets"):
        plain = adapted(case, tied=True).get_base_model()
        expected.append(run_plain(plain, padded_batch(plain.config), 2))
    for found in run_gloo(_tokens_and_copies, 2):
        for one, wanted in zip(found, expected, strict=True):
            assert_same(one, wanted)


@pytest.mark.parametrize("case", ["targets", "whole modules", "tokens"])
def test_new_adapters_do_not_depend_on_the_split(case: str, tmp_path: Path) -> None:
    config = tiny_config("llama", tied=True, attention_bias=True)
    options = {"target_modules": BLOCKS} | CASES[case]
    pipes = [Pipeline(config, k, 2, peft_config=peft.LoraConfig(r=3, **options), seed=3) for k in (1, 2, 5)]
    expected = dict(pipes[0].named_parameters())
    for pipe in pipes:
        assert dict(pipe.named_parameters()).keys() == expected.keys()
        assert all(torch.equal(p, expected[name]) for name, p in pipe.named_parameters())
        assert all(p.requires_grad == expected[name].requires_grad for name, p in pipe.named_parameters())
    with torch.no_grad():
        for parameter in expected.values():
            if parameter.requires_grad:
                parameter.add_(0.25)
    pipes[0].save_pretrained(tmp_path)
    for pipe in pipes[1:]:
        pipe.load_pretrained(tmp_path)
        assert all(torch.equal(p, expected[name]) for name, p in pipe.named_parameters())


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
def test_initial_values_from_the_weights(start: str, tmp_path: Path) -> None:
    """The stages subtract from their weights what the adapters begin with, so the model computes what it did."""
    plain = plain_model(tiny_config("llama"), dtype=torch.float32)
    plain.save_pretrained(tmp_path / "base")
    batch = padded_batch(plain.config)
    expected = run_plain(copy.deepcopy(plain), batch, 2).loss
    given = peft.LoraConfig(r=3, target_modules=BLOCKS, init_lora_weights=start)
    pipes = [Pipeline(tmp_path / "base", k, 2, peft_config=copy.deepcopy(given), seed=1) for k in (1, 3)]
    first = dict(pipes[0].named_parameters())
    for pipe in pipes:
        assert run_pipeline(pipe, batch).loss == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(p, first[name]) for name, p in pipe.named_parameters())
    weights = dict(plain.named_parameters())
    name = "model.layers.0.self_attn.q_proj"
    residual = weights[f"{name}.weight"] - first[f"{name}.base_layer.weight"]
    assert int(torch.linalg.matrix_rank(residual, rtol=1e-4)) == 3
    if start != "pissa_niter_4":  # its values are random, and seeded here
        theirs = peft.get_peft_model(copy.deepcopy(plain), copy.deepcopy(given)).get_base_model()
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(first[name], parameter)
    # Adapters that were trained belong to the weights that the initial values were subtracted from.
    with torch.no_grad():
        for pipe in pipes:
            for name, parameter in pipe.named_parameters():
                if "lora_A" in name:
                    parameter.mul_(1.5)
    pipes[1].save_pretrained(tmp_path / "adapters")
    resumed = Pipeline(tmp_path / "base", 2, 2, peft_config=copy.deepcopy(given), seed=1)
    resumed.load_pretrained(tmp_path / "adapters")
    assert run_pipeline(resumed, batch).loss == run_pipeline(pipes[0], batch).loss


def test_loftq_is_computed_where_the_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft computes it on CUDA alone; here the same decomposition of the rest, of weights that are rounded."""
    plain = plain_model(tiny_config("llama"), dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    given = peft.LoraConfig(r=3, target_modules=BLOCKS)
    # The constructor would ask for scipy.
    given.init_lora_weights, given.loftq_config = "loftq", {"loftq_bits": 4, "loftq_iter": 1}
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"init_lora_weights='loftq': peft computes.*q_proj on CUDA"):
            Pipeline(tmp_path, 2, 2, peft_config=copy.deepcopy(given))

    def rounded(weight: torch.Tensor, num_bits: int, reduced_rank: int, num_iter: int) -> tuple[torch.Tensor, ...]:
        scale = weight.abs().max() / 2 ** (num_bits - 1)
        coarse = (weight / scale).round() * scale
        left, sizes, right = torch.linalg.svd((weight - coarse).detach(), full_matrices=False)
        left = left * sizes.sqrt()
        return coarse.detach(), sizes.sqrt()[:reduced_rank, None] * right[:reduced_rank], left[:, :reduced_rank]

    monkeypatch.setattr(peft.tuners.lora.layer, "loftq_init", rounded)
    pipe = Pipeline(tmp_path, 2, 2, peft_config=copy.deepcopy(given))
    theirs = peft.get_peft_model(copy.deepcopy(plain), copy.deepcopy(given)).get_base_model()
    found = dict(pipe.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[name], parameter)


def test_what_is_refused() -> None:
    config = tiny_config("llama")

    def refused(message: str, dtype: str = "float32", **options: Any) -> None:
        with pytest.raises((UnsupportedModelError, UserError), match=message):
            Pipeline(config, 2, dtype=dtype, peft_config=peft.LoraConfig(**{"target_modules": BLOCKS} | options))

    both = [*BLOCKS, "lm_head", "embed_tokens"]
    refused("gives the embedding and the head one LoRA, transposed", target_modules=both, ensure_weight_tying=True)
    refused("decomposes weights of float32.*the model's are float64", "float64", init_lora_weights="pissa")
    refused(
        "those of 'lm_head' are also used elsewhere", target_modules=[*BLOCKS, "lm_head"], init_lora_weights="olora"
    )
    refused("nothing_like_it", trainable_token_indices={"nothing_like_it": [1]})
    with pytest.raises(
        UnsupportedModelError, match=r"would train 'shared\.lora_embedding_A.default'.*leave its module"
    ):
        Pipeline(clone("t5").config, 2, peft_config=peft.LoraConfig(target_modules=["q", "shared"]))
