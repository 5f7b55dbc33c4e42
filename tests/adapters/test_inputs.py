"""Inputs of a batch: packed sequences, a cache that is not needed, inputs that are not text."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import DataError, StageError, UserError
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.model.reference import MICRO_BATCHES, plain_step
from scripts.families import default_config
from tests.adapters.test_families import TOLERANCE, in_stages
from tests.test_packing import InFloat64


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_packed_sequences(family: str) -> None:
    """Without a mask, position ids that start again separate the sequences of a row, on every stage."""
    model = exact_clone(default_config(family), torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (4, 9), generator=generator)
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).repeat(4, 1)
    packed = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    with InFloat64():
        expected = plain_step(model, packed)
    whole = plain_step(model, packed | {"position_ids": torch.arange(9).repeat(4, 1)})
    assert expected.difference(whole) > 1e-3, "the sequences were not kept apart"
    num_layers = len(adapter_for(model.config, model.dtype).layers)
    for num_stages in (2, num_layers):
        model.zero_grad()
        with InFloat64():
            found = in_stages(Pipeline(model, num_stages, MICRO_BATCHES, recompute="stage"), packed)
        assert found.difference(expected) <= TOLERANCE


def test_a_cache_in_the_configuration_is_not_used_in_training() -> None:
    config = default_config("llama")
    config.use_cache = True
    model = exact_clone(config, torch.float64)
    assert model.config.use_cache
    ids = torch.arange(3, 21).view(2, 9)
    expected = plain_step(model, {"input_ids": ids, "labels": ids})
    model.zero_grad()
    pipe = Pipeline(model, 2, MICRO_BATCHES, recompute="none")
    assert in_stages(pipe, {"input_ids": ids, "labels": ids}).difference(expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["pixel_values", "inputs_embeds", "input_features"])
def test_inputs_that_are_not_text(name: str) -> None:
    pipe = Pipeline(exact_clone(default_config("llama"), torch.float64), 2, MICRO_BATCHES)
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises((UserError, StageError), match=name):
        pipe.train_step({"input_ids": ids, "labels": ids, name: torch.zeros(2, 5, 8)})


def test_an_encoder_decoder_without_a_first_token() -> None:
    config = default_config("t5")
    model = exact_clone(config, torch.float64)
    model.config.decoder_start_token_id = None
    with pytest.raises(UserError, match="decoder_start_token_id"):
        Pipeline(model, 2).train_step(
            {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5).long()}
        )


def test_mbart_needs_no_first_token() -> None:
    """Its decoder begins with the last token of each row of labels, the language."""
    model = exact_clone(default_config("mbart"), torch.float64)
    model.config.decoder_start_token_id = None
    labels = torch.arange(3, 15).view(2, 6)
    labels[1, 4:] = -100
    batch = {"input_ids": torch.arange(5, 15).view(2, 5), "labels": labels}
    expected = model(**batch).loss.item()
    assert float(Pipeline(model, 2, 2).train_step(batch)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("family", ["llama", "mamba", "mixtral", "t5"])
def test_bfloat16_is_that_of_the_plain_model(family: str) -> None:
    """Some families keep hidden states in float32 between half-precision blocks."""
    config = default_config(family)
    config.output_router_logits = family == "mixtral"
    model = exact_clone(config, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (4, 9), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    pipe = Pipeline(model, 3, MICRO_BATCHES, recompute="stage")
    adapter = pipe.adapter
    if family == "mamba":
        assert adapter.carry_dtype(2, "hidden") == torch.float32
        assert adapter.carry_dtype(1, "hidden") == torch.bfloat16
    expected = plain_step(model, batch, adapter)
    model.zero_grad()
    # A tie's gradients are summed in another order, which bfloat16 rounds.
    assert in_stages(pipe, batch).difference(expected) < 1e-2


@pytest.mark.parametrize(("family", "most"), [("bert", 64), ("roberta", 62), ("gpt2", 64)])
def test_a_row_that_is_longer_than_the_table_of_positions(family: str, most: int) -> None:
    """A table inside of a module of embeddings, as BERT's, was not found, and torch's own error said nothing of it.

    RoBERTa's positions begin after the row of its padding.
    """
    model = exact_clone(default_config(family), torch.float64)
    pipe = Pipeline(model, 2, 1)
    ids = torch.randint(3, 60, (2, most))
    batch = {"input_ids": ids, "labels": ids}
    assert float(pipe.train_step(batch)) == pytest.approx(float(model(**batch).loss), rel=1e-6)
    longer = torch.randint(3, 60, (2, most + 1))
    with pytest.raises(DataError, match=f"{most + 1} tokens long, and the decoder has positions for {most}"):
        pipe.train_step({"input_ids": longer, "labels": longer})
