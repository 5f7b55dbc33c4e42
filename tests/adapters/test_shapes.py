"""Of text models the shapes and types at a boundary are formulas of the configuration: stages send just that."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe.adapters import Blueprint, build_adapter
from hf_gpipe.model.clone import exact_clone, padded_batch
from hf_gpipe.pipeline.clone_steps import in_stages
from hf_gpipe.pipeline.variant import Variant
from scripts.families import default_config


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "gemma2", "mixtral", "t5", "marian"])
def test_formulas_of_shapes(family: str) -> None:
    model = exact_clone(default_config(family), torch.float32)
    adapter = build_adapter(Blueprint(model.config, torch.float32, "eager", type(model)))
    models = in_stages(model, adapter, Variant(None)).parameters.models
    for length in (3, 5):
        batch = {name: tensor[:, :length] for name, tensor in padded_batch(model).items()}
        inputs, carry = adapter.prepare(batch), {}
        for stage in list(models.values())[:-1]:
            carry = stage(inputs, carry)
            assert {name: tuple(t.shape) for name, t in carry.items()} == adapter.carry_shapes(stage.stop, inputs)
            assert all(t.dtype == adapter.carry_dtype(stage.stop, name) for name, t in carry.items())
