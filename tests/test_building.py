"""A Pipeline reads dtypes from its arguments, and does not change the caller's objects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, PreTrainedConfig

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from tests.oracle import padded_batch, plain_model, tiny_config

TYPES = [
    *[(name, torch.bfloat16) for name in ("bfloat16", "torch.bfloat16", torch.bfloat16)],
    *[("float32", torch.float32), ("float16", torch.float16), ("float64", torch.float64)],
    *[("auto", torch.float32), (None, torch.float32)],
]


def types_of(pipe: Pipeline) -> set[torch.dtype]:
    return {parameter.dtype for parameter in pipe.parameters()}


def state_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Everything that a configuration and those inside of it hold."""
    return {
        name: state_of(value) if isinstance(value, PreTrainedConfig) else copy.deepcopy(value)
        for name, value in vars(config).items()
    }


@pytest.mark.parametrize(("given", "expected"), TYPES)
def test_a_type_by_its_name(given: Any, expected: torch.dtype) -> None:
    """A text was written into the configuration, and a second Pipeline of it failed with a TypeError."""
    config = tiny_config("llama")
    before = state_of(config)
    for _ in range(2):
        assert types_of(Pipeline(config, 2, dtype=given)) == {expected}
        assert state_of(config) == before


def test_the_type_that_a_configuration_names() -> None:
    config = tiny_config("llama")
    for named in (torch.bfloat16, "bfloat16"):
        config.dtype = named
        for given in (None, "auto"):
            assert types_of(Pipeline(config, 2, dtype=given)) == {torch.bfloat16}
        assert types_of(Pipeline(config, 2, dtype="float32")) == {torch.float32}
        assert config.dtype is named
    config.dtype = "half a float"
    with pytest.raises(UserError, match="the configuration's dtype is 'half a float'; expected one of float32"):
        Pipeline(config, 2)


@pytest.mark.parametrize("given", ["bf16", "load", "", torch.int8, 16])
def test_what_is_not_a_type_of_weights_is_refused(given: Any) -> None:
    config = tiny_config("llama")
    before = state_of(config)
    with pytest.raises(UserError, match=r"dtype is .*; expected one of float32, bfloat16, float16, float64, or 'auto'"):
        Pipeline(config, 2, dtype=given)
    assert state_of(config) == before


def test_a_model_in_memory_keeps_its_type() -> None:
    model = plain_model(tiny_config("llama"))
    for same in (None, "auto", "float64", torch.float64):
        assert types_of(Pipeline(model, 2, dtype=same)) == {torch.float64}
    with pytest.raises(UserError, match=r"dtype=bfloat16: the given model is torch.float64"):
        Pipeline(model, 2, dtype="bfloat16")


@pytest.mark.parametrize("family", ["llama", "marian", "gemma3"])
def test_the_caller_s_configuration_is_never_changed(family: str, tmp_path: Path) -> None:
    """transformers writes the type and the attention it is asked for into the configuration that it is given."""
    if family == "gemma3":
        text = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config: PreTrainedConfig = Gemma3Config(text_config=text | heads, vision_config=vision)
    else:
        config = tiny_config(family)
    before = state_of(config)
    pipe = Pipeline(config, 2, 2, dtype="bfloat16", attn_implementation="eager", seed=1)
    batch = padded_batch(tiny_config(family if family == "marian" else "llama"))
    pipe.train_step(batch)
    pipe.generate(input_ids=batch["input_ids"][:1], max_new_tokens=2)
    pipe.save_pretrained(tmp_path)
    assert state_of(config) == before
    model = plain_model(config, dtype=torch.float32) if family != "gemma3" else None
    if model is not None:
        before = state_of(model.config)
        pipe = Pipeline(model, 2, 2, attn_implementation="sdpa")
        pipe.train_step(batch)
        pipe.save_pretrained(tmp_path)
        assert state_of(model.config) == before
