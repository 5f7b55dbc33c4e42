"""Each key of a mini-batch gives the plain model's numbers, or is an error that names the key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, LlamaForSequenceClassification, PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.adapters.text import num_tokens
from hf_gpipe.errors import DataError, UserError
from tests.oracle import Batch, Result, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config


def llama(**options: Any) -> PreTrainedModel:
    return plain_model(tiny_config("llama", **options))


def shifted_batch() -> Batch:
    """Targets that no shift of labels gives: other tokens, the last column and a column of padding among them."""
    batch = padded_batch(llama().config)
    batch["shift_labels"] = (batch["input_ids"] * 7 % 50).masked_fill(batch["attention_mask"] == 0, -100)
    batch["shift_labels"][-1, 7] = 5
    return batch


def with_shift_labels(model: PreTrainedModel, batch: Batch, parts: int) -> Result:
    """The plain model's own loss function, micro-batch after micro-batch."""
    model.zero_grad()
    count, total = (batch["shift_labels"] != -100).sum(), 0.0
    for i in range(parts):
        rows = {name: torch.tensor_split(tensor, parts)[i] for name, tensor in batch.items()}
        ids = {name: rows[name] for name in ("input_ids", "attention_mask")}
        logits = model(**ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["shift_labels"].flatten(), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return Result(total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("length_bucketing", [True, False])
def test_shift_labels(has_labels: bool, length_bucketing: bool) -> None:
    """shift_labels were ignored, and the loss was that of the labels."""
    model, batch = llama(), shifted_batch()
    expected = with_shift_labels(model, batch, 3)
    model.zero_grad()
    own = model(**batch, num_items_in_batch=(batch["shift_labels"] != -100).sum()).loss
    assert own.item() == pytest.approx(expected.loss, rel=1e-6), "transformers' loss, which is in float32"
    if not has_labels:
        del batch["labels"]
    pipe = Pipeline(model, 2, 3, length_bucketing=length_bucketing)
    assert_same(run_pipeline(pipe, batch), expected)
    assert float(pipe.eval_step(batch).loss) == pytest.approx(expected.loss, rel=1e-10)


def test_where_shift_labels_are_not_supported() -> None:
    """shift_labels were ignored, or cut like any other key, where nothing reads them."""
    batch = shifted_batch()
    with pytest.raises(UserError, match="shift_labels"):
        Pipeline(llama(), 2, 2, packing=True).train_step(batch)
    with pytest.raises(DataError, match="shift_labels"):
        Pipeline(llama(), 2, 2).train_step({**batch, "shift_labels": batch["shift_labels"][:, :-1]})
    with pytest.raises(DataError, match="shift_labels has 50"):
        Pipeline(llama(), 2, 2).train_step({**batch, "shift_labels": torch.full_like(batch["input_ids"], 50)})
    marian = plain_model(tiny_config("marian"))
    pairs = padded_batch(marian.config)
    with pytest.raises(DataError, match="shift_labels"):
        Pipeline(marian, 2, 2).train_step({**pairs, "shift_labels": pairs["labels"]})
    classifier = LlamaForSequenceClassification(tiny_config("llama", num_labels=3))
    classes = {**batch, "labels": torch.zeros(6, dtype=torch.long)}
    with pytest.raises(DataError, match="shift_labels"):
        Pipeline(classifier, 2, 2).train_step(classes)


def of_four_dimensions(mask: torch.Tensor, length: int, *, causal: bool, additive: bool) -> torch.Tensor:
    """(B, S) -> (B, 1, length, S)."""
    seen = mask.bool()[:, None, None, :].expand(-1, 1, length, -1).clone()
    if causal:
        seen = seen.tril()
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e30) if additive else seen


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("form", ["float", "additive 2-D", "additive", "bool"])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_masks(family: str, form: str, attention: str) -> None:
    """A 4-D mask of a decoder was cut at its second dimension, and no longer fitted the targets."""
    model = plain_model(tiny_config(family))
    model.set_attn_implementation(attention)
    batch = padded_batch(model.config)
    mask, last = batch["attention_mask"], batch["labels"].shape[1]
    batch["labels"][:, -2:] = -100
    if form == "float":
        batch["attention_mask"] = mask.double()
    elif form == "additive 2-D":
        # transformers reads it as a mask of what is not 0.
        batch["attention_mask"] = torch.zeros(mask.shape).masked_fill(mask == 1, -1e30)
    elif family == "llama":
        batch["attention_mask"] = of_four_dimensions(mask, mask.shape[1], causal=True, additive=form == "additive")
    else:
        ones = torch.ones(len(mask), last)
        batch["attention_mask"] = of_four_dimensions(mask, 1, causal=False, additive=form == "additive")
        batch["decoder_attention_mask"] = of_four_dimensions(ones, last, causal=True, additive=form == "additive")
    expected = run_plain(model, batch, 2)
    assert_same(run_pipeline(Pipeline(model, 3, 2, attn_implementation=attention), batch), expected)


def test_tokens_of_an_additive_mask() -> None:
    """The number of tokens was the sum of an additive mask, and minus infinity is no integer."""
    batch = padded_batch(tiny_config("llama"))
    mask = batch["attention_mask"]
    assert num_tokens(batch, decoder_only=True) == int(mask.sum())
    additive = torch.zeros(6, 1, 10, 10).masked_fill(mask[:, None, None] == 0, -torch.inf)
    assert num_tokens({**batch, "attention_mask": additive}, decoder_only=True) == 60


KEYS = {
    "position_ids": lambda ids: torch.arange(ids.shape[1]).expand(ids.shape) + 2,
    "token_type_ids": lambda ids: ids % 2,
    "some_column": lambda ids: ids,
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_keys_that_are_exact(family: str, name: str) -> None:
    """What the plain model reads or passes over, the stages read or pass over; else the key is an error."""
    own = GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = plain_model(own if family == "gpt2" else tiny_config("llama"))
    batch = padded_batch(model.config)
    batch[name] = KEYS[name](batch["input_ids"])
    expected = run_plain(model, batch, 2)
    assert_same(run_pipeline(Pipeline(model, 3, 2), batch), expected)


NOT_SUPPORTED = {
    "num_items_in_batch": torch.full((6,), 3),
    "logits_to_keep": torch.arange(6),
    "cache_position": torch.arange(6),
    "past_key_values": torch.zeros(6, 2),
    "head_mask": torch.zeros(6, 2),
    "use_cache": torch.ones(6),
    "output_attentions": torch.ones(6),
    "output_router_logits": torch.ones(6),
    "return_dict": torch.zeros(6),
    "encoder_outputs": torch.zeros(6, 2),
    "inputs_embeds": torch.zeros(6, 10, 16),
}


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_keys_that_are_not_supported(family: str) -> None:
    """num_items_in_batch, logits_to_keep and other keys of forward were ignored, or failed in a stage."""
    model = plain_model(tiny_config(family))
    batch = padded_batch(model.config)
    pipe = Pipeline(model, 2, 2)
    for name, value in NOT_SUPPORTED.items():
        with pytest.raises(DataError, match=name):
            pipe.train_step({**batch, name: value})
    with pytest.raises(DataError, match="use_cache"):
        pipe.train_step({**batch, "use_cache": False})
    with pytest.raises(DataError, match="attention_mask"):
        pipe.train_step({**batch, "attention_mask": {"full_attention": batch["attention_mask"]}})
    for wrong in (batch["attention_mask"][:, :-1], batch["attention_mask"][:, None]):
        with pytest.raises(DataError, match="attention_mask has the shape"):
            pipe.train_step({**batch, "attention_mask": wrong})


@pytest.mark.parametrize("name", ["global_attention_mask", "position_ids", "token_type_ids"])
def test_other_keys_of_an_encoder_decoder(name: str) -> None:
    """The encoder's stages ignored every key but the ids and the mask."""
    model = plain_model(tiny_config("marian"))
    batch = padded_batch(model.config)
    with pytest.raises(DataError, match=name):
        Pipeline(model, 2, 2).train_step({**batch, name: batch["input_ids"]})
