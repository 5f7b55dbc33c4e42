"""A recipe of a tiny translation model that three processes train in seconds, and the weights of its runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_gpipe.data import train_tokenizer
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.from_recipe.job import check_recipe
from hf_gpipe.from_recipe.model import model_config, spec_of
from hf_gpipe.model.opening import adapter_of
from hf_gpipe.recipe import load_recipe

#: How long the processes of the recipe wait for a message.
TIMEOUT_SECONDS = 8
#: Of the recipe, what runs may want otherwise.
VALUES = {"stages": 3, "micro": 2, "steps": 6, "save": 2, "evaluate": 3, "timeout": TIMEOUT_SECONDS}

RECIPE = """
model:
  config: {{model_type: marian, d_model: 8, encoder_layers: 2, decoder_layers: 2, encoder_attention_heads: 1,
    decoder_attention_heads: 1, encoder_ffn_dim: 8, decoder_ffn_dim: 8, max_position_embeddings: 32, dropout: 0.1}}
data: {{kind: jsonl, path: {folder}/pairs.jsonl, validation_fraction: 0.1, test_fraction: 0.1}}
tokenizer: {{path: {folder}/tokenizer}}
pipeline: {{num_stages: {stages}, num_micro_batches: {micro}, schedule: gpipe, recompute: stage, partition: count,
  device: cpu, timeout_seconds: {timeout}, threads_per_process: 1}}
training: {{output_dir: OUTPUT, max_steps: {steps}, batch_size: 4, logging_steps: 1, save_steps: {save},
  eval_steps: {evaluate}}}
evaluation: {{max_examples: 2, max_new_tokens: 3, samples: 1}}
"""


def prepare(folder: Path, **values: int | str) -> Path:
    """A recipe of a tiny model, its data and its tokenizer; `values` replace those of `VALUES`."""
    german, english = "null eins zwei drei vier acht neun zehn", "zero one two three four eight nine ten"
    words = list(zip(german.split(), english.split(), strict=True))
    pairs = [(f"{a} und {b}", f"{c} and {d}") for a, c in words for b, d in words]
    lines = [json.dumps({"source": source, "target": target}) for source, target in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    train_tokenizer([text for pair in pairs for text in pair], 290, folder / "tokenizer")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, **VALUES | values))
    return recipe


def observe(recipe: Path) -> None:
    """Observe the recipe's model, so that the processes that are forked from this one find it observed."""
    given = load_recipe(recipe)
    check_recipe(given)
    config = model_config(given, read_tokenizer(recipe.with_name("tokenizer")))
    adapter_of(spec_of(given, config))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved model."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
