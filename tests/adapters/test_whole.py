"""`Pipeline.model`: the library's model with the tensors that are trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, T5Config

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, padded_batch, plain_model, run_pipeline, tiny_config


def config_of(family: str) -> PreTrainedConfig:
    if family != "t5":
        return tiny_config(family)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    return T5Config(vocab_size=VOCABULARY, **sizes, pad_token_id=0, decoder_start_token_id=0)


@pytest.mark.parametrize("family", ["llama", "marian", "t5"])
def test_it_is_the_plain_model_over_the_trained_tensors(family: str) -> None:
    plain = plain_model(config_of(family))
    pipe = Pipeline(copy.deepcopy(plain), 3)
    model = pipe.model
    assert isinstance(model, type(plain))
    assert type(model).__name__ == type(plain).__name__
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    trained = dict(pipe.named_parameters())
    assert all(parameter is trained[name] for name, parameter in model.named_parameters())
    batch = padded_batch(plain.config)
    # After a step, so that a copy would have other values.
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    run_pipeline(pipe, batch)
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    plain.eval(), model.eval()
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    ids = batch["input_ids"][:1]
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    assert torch.equal(copy.deepcopy(model)(**batch).logits, plain(**batch).logits)
    assert type(copy.deepcopy(model)) is type(plain)


def test_tensors_that_are_loaded_or_replaced_are_seen(tmp_path: Path) -> None:
    config = tiny_config("marian")
    pipe, other = Pipeline(config, 2), Pipeline(config, 2, seed=1)
    model = pipe.model
    other.model.save_pretrained(tmp_path)
    pipe.load_pretrained(tmp_path)
    name, expected = next(iter(other.model.named_parameters()))
    assert torch.equal(model.get_parameter(name), expected)
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    changed = torch.nn.Parameter(expected.detach().clone())
    for stage in pipe.models.values():
        if name in stage.parameters:
            stage.replace_parameter(name, changed)
    assert pipe.model.get_parameter(name) is changed


def test_what_would_not_be_trained_is_refused() -> None:
    pipe = Pipeline(tiny_config("llama"), 2)
    model = pipe.model
    assert model.to("cpu").float() is model
    with pytest.raises(UserError, match="cannot change its device or type"):
        model.half()
    with pytest.raises(UserError, match="resize_token_embeddings"):
        model.resize_token_embeddings(60)
    with pytest.raises(UserError, match="push_to_hub"):
        model.push_to_hub("name")
    with pytest.raises(UserError, match="max_shard_size"):
        model.save_pretrained("folder", max_shard_size="1GB")
    model.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"new parameter 'model\.layers\.0\.extra"):
        pipe.model  # noqa: B018  # the property checks
    del model.model.layers[0].extra
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(UserError, match=r"lm_head\.weight of the pipeline's model was replaced"):
        pipe.model  # noqa: B018


def test_a_change_of_its_configurations_is_saved(tmp_path: Path) -> None:
    model = Pipeline(tiny_config("marian"), 2).model
    model.config.dropout = 0.3
    model.generation_config.max_length = 7
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (loaded.config.dropout, loaded.generation_config.max_length) == (0.3, 7)


def test_adapters_have_their_names() -> None:
    peft = pytest.importorskip("peft")
    given = peft.get_peft_model(plain_model(tiny_config("llama")), peft.LoraConfig(target_modules=["q_proj"]))
    base = given.get_base_model()
    expected = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    ids = torch.arange(3, 9)[None]
    logits = base.eval()(ids).logits
    pipe = Pipeline(given, 3)
    model = pipe.model.eval()
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == expected
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("tied", [True, False])
def test_on_two_processes_the_others_parameters_are_on_meta(tied: bool, tmp_path: Path) -> None:
    first, second = run_gloo(_on_two_processes, 2, tied, str(tmp_path))
    names = {name for name, _ in plain_model(tiny_config("marian", tied=tied)).named_parameters()}
    assert first["real"].isdisjoint(second["real"])
    assert first["real"] | second["real"] == names
    for one in (first, second):
        assert one["names"] == names
        assert one["frozen"] == {"model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}
        assert "several processes" in one["error"]
        assert torch.equal(one["tokens"], one["plain tokens"])


def _on_two_processes(tied: bool, folder: str) -> dict[str, Any]:
    plain = plain_model(tiny_config("marian", tied=tied))
    pipe = Pipeline(copy.deepcopy(plain), 2)
    model, ids = pipe.model, torch.arange(3, 9)[None]
    with pytest.raises(UserError) as caught:
        model(ids, labels=ids)
    trained = dict(pipe.named_parameters())
    real = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert all(model.get_parameter(name) is trained[name] for name in real)
    model.save_pretrained(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert all(torch.equal(one, loaded.get_parameter(name)) for name, one in trained.items())
    return {
        "names": {name for name, _ in model.named_parameters()},
        "real": real,
        "frozen": {name for name, parameter in model.named_parameters() if not parameter.requires_grad},
        "error": str(caught.value),
        "tokens": model.generate(ids, max_new_tokens=4),
        "plain tokens": plain.eval().generate(ids, max_new_tokens=4),
    }
