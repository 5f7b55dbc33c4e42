"""On versions of the libraries that were not tested, tiny clones are compared before a model is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MarianConfig, PreTrainedConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for, is_known_exact
from hf_gpipe.checkpoint import stage_weights, writer
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries import verified
from hf_gpipe.model import clone
from hf_gpipe.model.verified_files import verify_files
from hf_gpipe.pipeline.generated import verify_generation
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.runtime import generation
from tests.oracle import plain_model, tiny_config

ADVICE = r"; hf_gpipe was not tested with transformers 5\.99\.1: pip install \"torch==.*\" \"transformers==.*\"$"


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of transformers that nobody has tested, in a process that has compared nothing yet."""
    installed = verified.version
    monkeypatch.setattr(verified, "version", lambda name: "5.99.1" if name == "transformers" else installed(name))
    monkeypatch.setattr(clone, "_compared", {})


def generate(config: PreTrainedConfig) -> Any:
    model = plain_model(config).eval()
    ids = torch.arange(3, 11).view(2, 4)
    return Pipeline(model, 2).generate(input_ids=ids, max_new_tokens=3, do_sample=False)


def test_versions_are_compared_by_their_first_two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = {name: f"{versions[-1]}.3+cu130" for name, versions in verified.VERIFIED.items()}
    monkeypatch.setattr(verified, "version", newest.__getitem__)
    assert verified.unverified() == ()
    assert verified.install_advice() == ""
    newest["torch"] = "2.99.0"
    assert verified.unverified() == ("torch 2.99.0",)


@pytest.mark.usefixtures("unseen")
def test_everything_is_compared_on_an_unseen_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and files when the pipeline is made, generation at the first generate, each once."""
    compared: list[str] = []
    compared_once = clone.compared_once

    def seen(adapter: Any, what: str, compare: Any) -> Any:
        return compared_once(adapter, what, lambda: (compared.append(what), compare())[1])

    for module in ("pipeline.exactness", "model.verified_files", "pipeline.generated"):
        monkeypatch.setattr(f"hf_gpipe.{module}.compared_once", seen)
    config = tiny_config("llama", tied=False)
    assert not is_known_exact(adapter_for(config))
    model, ids = plain_model(config).eval(), torch.arange(3, 11).view(2, 4)
    state = torch.get_rng_state()
    for _ in range(2):
        Pipeline(model, 2).generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state), "random numbers go on as on a version that is known"
    assert compared == [str(Variant()), "files", str(Variant(2, generates=True))]


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_a_renamed_argument_of_the_cache_is_an_error_before_the_first_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers 5.24, where Marian then wrote other text without a word."""
    monkeypatch.setattr(generation, "cache_argument", lambda model: "renamed")
    with pytest.raises(UnsupportedModelError, match=rf"'{family}' is not supported: generation .*{ADVICE}"):
        generate(tiny_config(family, tied=False))


@pytest.mark.usefixtures("unseen")
def test_files_that_are_read_otherwise_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that a release changes would give other weights."""
    take = stage_weights.load

    def changed(stage: Any, *args: Any, **options: Any) -> None:
        take(stage, *args, **options)
        with torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                if name.endswith("q_proj.weight"):
                    parameter.copy_(parameter.flip(0))

    monkeypatch.setattr(stage_weights, "load", changed)
    with pytest.raises(UnsupportedModelError, match=rf"in stages reads .*q_proj.weight.* otherwise.*{ADVICE}"):
        Pipeline(tiny_config("llama", tied=False), 2)


@pytest.mark.usefixtures("unseen")
def test_files_that_are_written_otherwise_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = writer.in_hub_form

    def changed(stage: Any, tensors: Any) -> Any:
        return {name: tensor + 1 if "o_proj" in name else tensor for name, tensor in written(stage, tensors).items()}

    monkeypatch.setattr(writer, "in_hub_form", changed)
    with pytest.raises(UnsupportedModelError, match=rf"in stages saves .*o_proj.weight.* otherwise.*{ADVICE}"):
        Pipeline(tiny_config("llama", tied=False), 2)


@pytest.mark.parametrize("config", [LlamaConfig(), MarianConfig()], ids=lambda config: config.model_type)
def test_the_comparisons_pass_on_this_version(config: PreTrainedConfig) -> None:
    adapter = adapter_for(config)
    verify_generation(adapter, Variant(generates=True))
    verify_files(adapter)
