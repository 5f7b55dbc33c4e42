"""The loss on held-out text is the plain model's, whatever the number of stages and the size of a batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hf_gpipe import Pipeline
from hf_gpipe.data.tokenizer import train_tokenizer
from hf_gpipe.errors import RecipeError
from hf_gpipe.from_recipe import job
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.from_recipe.held_out import HeldOut, evaluate_text, text_report
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.tasks.text import TokenBlocks
from tests.oracle import plain_model, tiny_config

DOCUMENTS = ["a bad cab", "a dab", "bad", "cab dab abc"]
BLOCK = 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(DOCUMENTS, 268, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("num_stages", "batch_size"), [(1, 1), (3, 2), (2, 50)])
def test_it_is_the_plain_model_s(num_stages: int, batch_size: int, tokenizer: Any) -> None:
    config = tiny_config("llama")
    config.vocab_size = len(tokenizer)
    model = plain_model(config).eval()
    joined = [t for d in DOCUMENTS for t in [*tokenizer(d, add_special_tokens=False).input_ids, tokenizer.eos_token_id]]
    nll, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(joined), BLOCK):
            ids = torch.tensor([joined[start : start + BLOCK]])
            if ids.shape[1] > 1:
                logits = model(input_ids=ids).logits[0, :-1].double()
                nll += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
                count += ids.shape[1] - 1
    pipe = Pipeline(model, num_stages, 2)
    blocks = TokenBlocks(DOCUMENTS, tokenizer, BLOCK)
    report = evaluate_text(pipe, HeldOut(lambda: blocks, batch_size)).to_dict()
    assert (report["task"], report["num_tokens"]) == ("language modelling", count)
    assert report["loss"] == pytest.approx(nll / count, rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    first = evaluate_text(pipe, HeldOut(lambda: blocks, batch_size, 2)).to_dict()
    assert (first["num_rows"], first["num_tokens"]) == (2, 2 * (BLOCK - 1))


def test_a_report_where_the_model_is_sure_of_the_wrong_token() -> None:
    assert text_report(1, 4, 800.0).to_dict()["perplexity"] == math.inf
    assert text_report(1, 4, 0.0).to_dict()["perplexity"] == 1.0
    assert "perplexity inf" in text_report(1, 4, 800.0).text("test")
    assert text_report(1, 4, math.nan).text("test").endswith("(test split, 4 tokens)\n\nloss nan, perplexity nan")


def test_blocks_longer_than_the_model_has_positions_for_are_refused() -> None:
    text = """
model: {config: {model_type: gpt2, n_embd: 8, n_head: 2, n_layer: 2, n_positions: 64, vocab_size: 300}}
data: {kind: text, path: text.txt, max_target_tokens: 65}
training: {output_dir: out}
"""
    with pytest.raises(RecipeError, match=r"data\.max_target_tokens is 65, .* has positions for 64"):
        check_model(parse_recipe(text))
    check_model(parse_recipe(text, ["data.max_target_tokens=64"]))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    text = """
model: {config: {model_type: t5}}
data: {kind: text, path: text.txt}
training: {output_dir: out}
"""
    with pytest.raises(RecipeError, match="t5 is an encoder-decoder"):
        check_model(parse_recipe(text))
    with pytest.raises(RecipeError, match=r"data\.path is missing"):
        parse_recipe(text, ["data.path=null"])
    with pytest.raises(RecipeError, match=r"data\.temperature is 5\.0 \(a number\) and data\.kind is text"):
        parse_recipe(text, ["data.temperature=5"])
    with pytest.raises(RecipeError, match=r"data\.subset is \{.*\(a mapping\) and kind is text"):
        parse_recipe(text, ["data.subset={de: de}"])


def test_a_path_of_another_type_of_model_is_told(tmp_path: Path) -> None:
    """It was read as the type that the recipe names, and its weights were all missing."""
    tiny_config("llama").save_pretrained(tmp_path)
    text = f"model: {{path: {tmp_path}, config: {{model_type: gpt2}}}}\ndata: {{kind: text, path: a.txt}}\n"
    text += "training: {output_dir: out}\n"
    with pytest.raises(RecipeError, match=r"model\.config\.model_type is gpt2 and the model at '.*' is a llama; leave"):
        check_model(parse_recipe(text))
    check_model(parse_recipe(text, ["model.config.model_type=llama", "data.max_target_tokens=64"]))


def test_what_json_does_not_know_is_null() -> None:
    metrics = {"loss": math.nan, "per_bucket": {"low": {"nll": math.inf}}, "peaks": [1, math.nan], "name": "a"}
    expected = {"loss": None, "per_bucket": {"low": {"nll": None}}, "peaks": [1, None], "name": "a"}
    assert job._finite(metrics) == expected
