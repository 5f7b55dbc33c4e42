"""A recipe whose pairs are streamed: trained, stopped, gone on with, and what is said before it starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_gpipe.train import main
from tests.data import hub_directories

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

RECIPE = """
model:
  config: {model_type: marian, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2,
    decoder_attention_heads: 2, encoder_ffn_dim: 32, decoder_ffn_dim: 32, max_position_embeddings: 64, dropout: 0.1}
data:
  kind: hub
  path: DATA
  subset: ["{language}-en", "en-{language}"]
  source_field: translation.{language}
  target_field: translation.en
  languages: [de, yo]
  direction: both
  streaming: true
  shuffle_buffer: 20
  temperature: 5
tokenizer: {vocab_size: 288, training_pairs: 60}
pipeline: {num_stages: 2, num_processes: 1, num_micro_batches: 2, device: cpu,
  schedule: gpipe, partition: count, recompute: stage}
training: {output_dir: OUTPUT, max_steps: 6, batch_size: 4, learning_rate: 1.0e-3, lr_scheduler_type: constant,
  logging_steps: 1, save_steps: 3}
evaluation: {max_examples: 3, max_new_tokens: 6, samples: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], str]:
    """The path of a recipe with that output directory."""
    data = hub_directories.write(
        tmp_path / "data", {"de-en": {"train": 60, "validation": 4, "test": 4}, "en-yo": {"train": 100}}, shards=2
    )

    def write(name: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(RECIPE.replace("DATA", str(data)).replace("OUTPUT", str(tmp_path / name)))
        return str(path)

    return write


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of all shards of a model."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_streamed_run_goes_on_as_if_it_had_not_stopped(recipe, tmp_path, capsys):
    path, folder = recipe("run"), tmp_path / "run"
    assert main([path]) == 0, capsys.readouterr().err
    assert "streamed pairs, 2 languages" in capsys.readouterr().out
    whole = weights(folder)
    # As after a crash in step 4.
    shutil.rmtree(folder / "checkpoint-6")
    assert main([path]) == 0
    assert "checkpoint-3" in capsys.readouterr().out
    resumed = weights(folder)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {language: entry["training_pairs"] for language, entry in metrics["per_language"].items()} == {
        "de": 60,
        "yo": 100,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.max_steps=null"], "data.streaming is true, and a stream has no end; set training.max_steps"),
        (["data.max_examples=5"], "data.max_examples is 5 (a whole number) and streaming is true"),
        (["data.kind=cldr", "data.streaming=true"], "data.streaming is true (a boolean) and data.kind is cldr, which"),
        (["data.counts={de: many, yo: 1}"], "data.counts.de is 'many' (a string); give the number of its pairs"),
        (["data.streaming=false", "data.counts={de: 1, yo: 1}"], "(a mapping) and streaming is false"),
        (["data.subset={de: 3}"], "data.subset.de is 3 (a whole number); give the name of a subset"),
        (["data.path=./nowhere"], "data.path: there is no directory ./nowhere"),
        (["data.kind=csv", "data.path=nowhere"], "data.path: there is no file nowhere (nowhere does not exist"),
        (["data.kind=parallel"], "data.target_path is missing"),
        (["data.delimiter=ab"], "data.delimiter: found 'ab' (a string), expected a string of 1 character or null"),
        (["data.languages=[de, xx]"], "no subset 'xx-en' or 'en-xx'"),
    ],
)
def test_what_a_recipe_gets_wrong_is_said_in_one_line(words, message, recipe, capsys):
    assert main([recipe("out"), *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
