"""Texts with a class: a recipe has the loss of plain transformers, and what is wrong with a row is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, LlamaForCausalLM

from hf_gpipe.data import LabelCollator, LabelledExamples, train_tokenizer
from hf_gpipe.errors import DataError, RecipeError, UnsupportedModelError
from hf_gpipe.from_recipe import job
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.from_recipe.model import model_config, spec_of
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.job.job import Job
from hf_gpipe.recipe import Recipe, parse_recipe
from hf_gpipe.tasks.classify import labelled_of
from scripts.families import default_config
from tests.oracle import tiny_config

WORDS = ["bad", "good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with its tokenizer, and rows: their text says how long they are."""
    made = tmp_path_factory.mktemp("labelled")
    train_tokenizer(WORDS * 20, 266, made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    config = tiny_config("llama", tied=False)
    config.update({"vocab_size": len(tokenizer), "pad_token_id": None, "eos_token_id": tokenizer.eos_token_id})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(made)
    with (made / "rows.jsonl").open("w") as lines:
        for number in range(60):
            text = " ".join([WORDS[number % 2]] * (1 + number % 7)) + f" {number}"
            label = WORDS[number % 2] if number % 3 else number % 2
            lines.write(json.dumps({"review": {"text": text}, "label": label}) + "\n")
    return made


def recipe(folder: Path, *overrides: str) -> Recipe:
    text = """
    model: {path: FOLDER}
    data: {kind: classification, path: FOLDER/rows.jsonl, labels: [bad, good], text_field: review.text,
           validation_fraction: 0.2, test_fraction: 0.2, max_length: 12}
    pipeline: {num_stages: 2, num_micro_batches: 2, device: cpu, schedule: gpipe, partition: count, recompute: stage}
    training: {output_dir: FOLDER/out, max_steps: 8, batch_size: 8, eval_steps: 4, learning_rate: 0.02}
    evaluation: {batch_size: 4}
    """
    return parse_recipe(text.replace("FOLDER", str(folder)), overrides)


@pytest.mark.usefixtures("no_prediction")
def test_a_recipe_trains_a_new_head_with_the_loss_of_plain_transformers(folder: Path) -> None:
    given = recipe(folder)
    job.run(given, Job.current())
    out = folder / "out"
    metrics = json.loads((out / "metrics.json").read_text())
    plain = AutoModelForSequenceClassification.from_pretrained(out)
    assert plain.config.id2label == {0: "bad", 1: "good"}
    tokenizer = AutoTokenizer.from_pretrained(out)
    rows = LabelledExamples(task_of(given).corpus(given).test, tokenizer, labels=WORDS, max_length=12)
    assert 0 < max(rows.lengths) <= 12
    assert rows.num_truncated > 0
    batch = LabelCollator.for_config(plain.config)([rows[number] for number in range(len(rows))])
    with torch.no_grad():
        expected = plain.eval()(**batch)
    assert metrics["num_rows"] == len(rows)
    assert metrics["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert metrics["accuracy"] == float((expected.logits.argmax(-1) == batch["labels"]).double().mean())
    evaluated = [
        line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "eval_loss" in line
    ]
    assert all("eval_accuracy" in line for line in evaluated)
    assert evaluated[-1]["eval_loss"] < 0.9 * evaluated[0]["eval_loss"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "x: no field 'label'"),
        ({"text": " ", "label": "bad"}, "x: field 'text' is ' '; it must be text that is not empty"),
        ({"text": "a", "label": "god"}, "x: field 'label' is 'god'; did you mean 'good'"),
        ({"text": "a", "label": 2}, "x: field 'label' is 2; it must be one of data.labels"),
        ({"text": "a", "label": True}, "x: field 'label' is True"),
        ({"text": "a", "label": -1}, "x: field 'label' is -1, as of a row without a label; evaluate on a split"),
    ],
)
def test_what_is_no_row_with_a_label(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        labelled_of("x", row, labels=WORDS)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.labels=[one]", "name each class once, at least two"),
        ("data.labels=[one, one]", "name each class once, at least two"),
        ("training.packing=true", r"data.kind is classification, which does not use it; it is for cldr, jsonl"),
        ("data.assistant_only_loss=false", "data.kind is classification, which does not use it"),
    ],
)
def test_recipes_that_contradict_themselves(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(tmp_path, override)


def test_models_that_have_no_head_of_classes(tmp_path: Path) -> None:
    def of(family: str) -> Recipe:
        return recipe(tmp_path, "model.path=null", f"model.config={{model_type: {family}}}")

    with pytest.raises(RecipeError, match=r"data\.kind is classification, which a decoder-only model learns"):
        check_model(of("marian"))
    with pytest.raises(UnsupportedModelError, match="no model of the family cohere for AutoModelForSequence"):
        check_model(of("cohere"))


def test_a_split_without_labels_is_not_read(folder: Path) -> None:
    rows = folder / "with-splits"
    rows.mkdir()
    for name, size, label in (("train", 20, 1), ("validation", 5, 0), ("test", 5, -1)):
        columns = {"text": [f"{name} {number}" for number in range(size)], "label": [label] * size}
        pyarrow.parquet.write_table(pyarrow.table(columns), rows / f"{name}-00000-of-00001.parquet")
    words = [f"data.path={rows}", "data.text_field=text", "data.kind=classification", "data.validation_fraction=0.0"]
    evaluated = recipe(folder, *words, "data.test_fraction=0.0", "evaluation.split=validation")
    corpus = task_of(evaluated).corpus(evaluated)
    assert [len(corpus.train), len(corpus.validation), len(corpus.test)] == [20, 5, 0]
    unlabelled = recipe(folder, *words, "data.test_fraction=0.0")
    with pytest.raises(DataError, match=r"split test: field 'label' is -1, as of a row without a label"):
        task_of(unlabelled).corpus(unlabelled)


def test_a_text_model_inside_of_a_composite_one_knows_its_padding(folder: Path, tmp_path: Path) -> None:
    config = default_config("gemma3")
    config.get_text_config().pad_token_id = None
    config.save_pretrained(tmp_path)
    given = recipe(folder, f"model.path={tmp_path}", "model.config={text_config: {hidden_act: gelu}}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = model_config(given, tokenizer)
    assert made.get_text_config().pad_token_id is not None
    overrides = spec_of(given, made).config_overrides
    assert overrides is not None
    again = AutoConfig.from_pretrained(tmp_path, **overrides)
    assert again.get_text_config().pad_token_id == made.get_text_config().pad_token_id
    assert again.get_text_config().hidden_act == "gelu"
    assert again.architectures == made.architectures
