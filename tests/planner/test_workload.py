"""The shape of a micro-batch, from a recipe and from a batch."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.workload import longest_mini_batch
from hf_gpipe.planner.costs.measure import profile_layers
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import parse_recipe
from tests.oracle import tiny_config

RECIPE = """
model: {config: {model_type: marian}}
data: {kind: cldr, languages: [de], max_source_tokens: 30, max_target_tokens: 20}
training: {output_dir: out, batch_size: 10}
"""


def test_of_a_recipe_rows_are_the_longest() -> None:
    recipe = parse_recipe(RECIPE)
    assert longest_mini_batch(recipe, is_encoder_decoder=True) == Workload(10, 30, 20)
    assert longest_mini_batch(recipe, is_encoder_decoder=False) == Workload(10, 50, 50)


def test_of_a_recipe_by_tokens_all_rows_are_of_the_longest() -> None:
    recipe = parse_recipe(RECIPE.replace("batch_size: 10", "batch_tokens: 201"))
    assert longest_mini_batch(recipe, is_encoder_decoder=True) == Workload(11, 30, 20)
    assert longest_mini_batch(recipe, is_encoder_decoder=False) == Workload(11, 50, 50)
    recipe = parse_recipe(RECIPE.replace("batch_size: 10", "batch_tokens: 3"))
    assert longest_mini_batch(recipe, is_encoder_decoder=True) == Workload(1, 30, 20)


@pytest.mark.parametrize("family", ["llama", "marian"])
@pytest.mark.parametrize("has_padding", [True, False])
def test_inputs_have_the_shape(family: str, has_padding: bool) -> None:
    workload = Workload(3, 7, 5, has_padding)
    inputs = workload.inputs(adapter_for(tiny_config(family)))
    expected = {"input_ids": (3, 7), "labels": (3, 5), "decoder_input_ids": (3, 5)}
    if family == "llama":
        expected = {"input_ids": (3, 5), "labels": (3, 5)}
    if has_padding:
        expected["attention_mask"] = expected["input_ids"]
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == expected
    assert not has_padding or not inputs["attention_mask"].all()


def test_of_a_batch() -> None:
    batch = {"input_ids": torch.ones(5, 8), "labels": torch.ones(5, 6), "attention_mask": torch.ones(5, 8)}
    assert Workload.from_batch(batch) == Workload(5, 8, 6, has_padding=False)
    batch["attention_mask"][0, 7] = 0
    assert Workload.from_batch(batch) == Workload(5, 8, 6)


def test_packed_rows_count_by_their_tokens() -> None:
    mask = (torch.arange(8) < torch.tensor([[8], [2], [3], [2]])).long()
    batch = {"input_ids": torch.ones(4, 8, dtype=torch.long), "attention_mask": mask}
    assert Workload.from_batch(batch, packing=True) == Workload.packed(4, (4, 8), (4, 8))
    pairs = batch | {"labels": torch.tensor([[5, -100, -100], [5, 5, 5], [5, 5, -100], [5, 5, -100]])}
    found = Workload.from_batch(pairs, packing=True, adapter=adapter_for(tiny_config("marian")))
    assert found == Workload.packed(4, (4, 8), (2, 3))
    flattened = {name: torch.cat([torch.arange(n) for n in (3, 5)])[None] for name in ("input_ids", "position_ids")}
    assert Workload.from_batch(flattened | {"max_length_q": 5}) == Workload.packed(2, (4, 5), (4, 5))
    assert found.with_rows(3) == Workload.packed(3, (4, 8), (2, 3))
    assert found.with_rows(1) == Workload.packed(1, (8, 8), (3, 3))
    recipe = parse_recipe(RECIPE.replace("batch_size: 10", "batch_size: 10, packing: true"))
    assert longest_mini_batch(recipe, is_encoder_decoder=False) == Workload.packed(10, (50, 50), (50, 50))


@pytest.mark.parametrize(("attention", "shape"), [("sdpa", (3, 5)), ("eager", (1, 15))])
def test_packed_rows_are_one_where_attention_has_one_mask(attention: str, shape: tuple[int, int]) -> None:
    inputs = Workload.packed(3, (5, 5), (5, 5)).inputs(adapter_for(tiny_config("llama"), attn_implementation=attention))
    assert {tuple(tensor.shape) for tensor in inputs.values()} == {shape}
    assert "attention_mask" not in inputs


def test_an_empty_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match="rows=0"):
        Workload(0, 1, 1)


@pytest.mark.parametrize("family", ["llama", "marian", "bart"])
def test_no_longer_than_the_model_has_positions_for(family: str) -> None:
    """Rows that are longer cannot be trained on, and could not be measured."""
    adapter = adapter_for(tiny_config(family))
    most = 200 if family == "llama" else 64
    assert Workload(2, 200, 200).within(adapter) == Workload(2, most, most)
    assert Workload(2, 9, 5).within(adapter) == Workload(2, 9, 5)
    assert profile_layers(adapter, Workload(1, 70, 70), torch.device("cpu"), repeats=1, budget_seconds=0.0).layers
