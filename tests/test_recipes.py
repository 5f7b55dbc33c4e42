"""Every recipe under recipes/: it parses, can be planned, and trains once it is made small."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from examples import digit_questions
from hf_gpipe.commands import plan
from hf_gpipe.data import train_tokenizer
from hf_gpipe.from_recipe import job
from hf_gpipe.job.job import Job
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.settings.kinds import LABELLED, PAIRED_KINDS, SEQUENCE_KINDS
from hf_gpipe.tasks.translation.cldr import coverage
from tests.data import hub_directories, multilingual

REPOSITORY = Path(__file__).parents[1]
RECIPES = sorted((REPOSITORY / "recipes").glob("**/*.yaml"))
NAMES = [str(path.relative_to(REPOSITORY / "recipes")) for path in RECIPES]
#: Those that tests/planner/test_plans.py plans.
PLANNED = ("quickstart.yaml", "translation/laptop-deep.yaml", "causal/pretrain.yaml")
every_recipe = pytest.mark.parametrize("path", RECIPES, ids=NAMES)

_TINY_BART = [
    *(f"model.config.{side}_{name}" for side in ("encoder", "decoder") for name in ("layers=1", "ffn_dim=16")),
    *(f"model.config.{side}_attention_heads=2" for side in ("encoder", "decoder")),
    "model.config.d_model=16",
]
#: What makes a model of each family tiny; T(L, H, A) comes from the dial.
TINY_MODEL = {
    "marian": _TINY_BART,
    "m2m_100": _TINY_BART,
    "t5": ["model.transformer=T(1, 16, 1)", "model.config.d_model=16"],
    "llama": [
        *("model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=2"),
        *("model.config.num_attention_heads=2", "model.config.num_key_value_heads=2"),
    ],
}
TINY_TRAINING = [
    *("training.max_steps=2", "training.batch_size=4", "training.logging_steps=1", "training.save_steps=null"),
    *("training.warmup_steps=0", "training.bf16=false", "pipeline.num_stages=2", "pipeline.num_processes=1"),
    *(
        "training.gradient_accumulation_steps=1",
        "pipeline.num_micro_batches=2",
        "pipeline.device=cpu",
        "evaluation.max_examples=2",
    ),
    *("evaluation.batch_size=8", "evaluation.max_new_tokens=4"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pretrained decoder-only model, in place of one of the Hub; its tokenizer spells much in bytes."""
    folder = tmp_path_factory.mktemp("qwen")
    train_tokenizer(["de of de-en, train 0 1 2 3 4 5 6 7 8 9", "en of de-en, test validation"], 288, folder)
    config = Qwen2Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def own_model(recipe: Recipe, data: Path, models: Path) -> Path:
    """The tiny model in place of the recipe's."""
    own = "questions/model" if recipe.data.kind == "image_text" else "nllb" if recipe.data.language_codes else None
    return models if own is None else data / own


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data in the form that each recipe names, a few rows of it."""
    folder = tmp_path_factory.mktemp("data")
    splits = {"train": 40, "validation": 6, "test": 6}
    hub_directories.write(folder / "opus-100", {"de-en": splits, "en-fr": splits})
    hub_directories.write(folder / "wmt19", {"de-en": {"train": 40, "validation": 6}})
    with (folder / "tldr.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(120):
            row = {"src_lang": "en", "tgt_lang": ["de", "ko"][number % 2], "src": f"Show the page {number}"}
            lines.write(json.dumps(row | {"tgt": f"Zeige Seite {number}", "page": "common/man.md"}) + "\n")
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            # The tokenizer knows these characters.
            turns = [{"role": "user", "content": f"de {number}"}, {"role": "assistant", "content": f"en {number}"}]
            lines.write(json.dumps({"messages": turns}) + "\n")
    with (folder / "preferences.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            lines.write(json.dumps({"prompt": f"de {number}:", "chosen": f" en {number}", "rejected": " of"}) + "\n")
    with (folder / "answers.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            row = {"prompt": f"de {number}:", "completion": f" en {number}", "label": number % 3 > 0}
            lines.write(json.dumps(row) + "\n")
    with (folder / "reviews.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            row = {"text": f"{['de', 'en'][number % 2]} {number}", "label": ["negative", "positive"][number % 2]}
            lines.write(json.dumps(row) + "\n")
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            lines.write(json.dumps({"prompt": f"de {number}", "answer": f"en {number}"}) + "\n")
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(40):
            lines.write(json.dumps({"anchor": f"de {number}", "positive": f"en {number}"}) + "\n")
    digits = []
    for number in range(60):
        file = io.BytesIO()
        Image.new("L", (8, 8), number).save(file, format="PNG")
        digits.append({"image": {"bytes": file.getvalue(), "path": None}, "label": number % 10})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(digits), folder / "digits.parquet")
    pixels = np.random.default_rng(0).integers(0, 17, (60, 8, 8))
    digit_questions.write_rows(folder / "questions" / "data", pixels, [number % 10 for number in range(60)])
    digit_questions.write_model(folder / "questions" / "model")
    of = multilingual.tokenizer("nllb", folder)
    of.save_pretrained(folder / "nllb")
    multilingual.model("nllb", of).float().save_pretrained(folder / "nllb")
    text = folder / "wikitext"
    text.mkdir()
    for split, count in splits.items():
        rows = [
            {"text": "" if n % 3 else f" Paragraph {n} of the {split} split , which says a few things . \n"}
            for n in range(count)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), text / f"{split}-00000-of-00001.parquet")
    return folder


def tiny(path: Path, data: Path, models: Path) -> list[str]:
    """Overrides that make a recipe small, and have it read data and models of this machine."""
    recipe = load_recipe(path)
    # What would be planned, which the test above does.
    decided = {"partition": "count", "schedule": "gpipe", "recompute": "stage"}
    small = [*TINY_TRAINING]
    if not recipe.pipeline.offload_weights:
        is_open = [key for key in decided if getattr(recipe.pipeline, key) in (None, "auto", "flops")]
        small += [f"pipeline.{key}={decided[key]}" for key in is_open]
    if recipe.data.kind in ("images", "image_text"):
        of_text = ("evaluation.max_new_tokens",)
        small = [one for one in small if not one.startswith(of_text)]
        if recipe.data.kind == "images":
            return [*small, f"data.path={data / 'digits.parquet'}", "data.test_fraction=0.2"]
        return [*small, f"data.path={data}/questions/data", f"model.path={own_model(recipe, data, models)}"]
    models = own_model(recipe, data, models)
    overrides = [*small, f"tokenizer={{path: {models}}}"]
    if recipe.data.kind not in SEQUENCE_KINDS:
        overrides.append("evaluation.samples=1")
    if recipe.model.path is not None:
        overrides += [f"model.path={models}", "pipeline.partition=count"]
        # Weights that visit need stages that come and go.
        overrides.append("pipeline.num_stages=4" if recipe.pipeline.offload_weights else "pipeline.recompute=none")
    else:
        overrides += TINY_MODEL[recipe.model.config["model_type"]]
    if recipe.distillation.teacher is not None:
        overrides.append(f"distillation.teacher={models}")
    if recipe.training.batch_tokens is not None:
        overrides.append("training.batch_tokens=40")
    if recipe.training.eval_steps is not None:
        overrides.append("training.eval_steps=2")
    if recipe.training.load_best_model_at_end:
        overrides.append("training.save_steps=2")
    if recipe.data.kind == "cldr":
        few = ["data.languages=[de, fr]"] if recipe.data.languages else ["data.num_languages=3"]
        return [
            *(*overrides, *few, "data.examples_per_language=60", "data.min_examples_per_language=20"),
            *("data.test_fraction=0.2", "data.validation_fraction=0.2"),
        ]
    if recipe.data.kind == "jsonl":
        return [
            *(*overrides, *(["data.languages=[de, ko]"] if recipe.data.languages else [])),
            f"data.path={data / 'tldr.jsonl'}",
            "data.test_fraction=0.2",
            "data.validation_fraction=0.2",
        ]
    if recipe.data.kind in PAIRED_KINDS:
        return [*overrides, f"data.path={data / 'preferences.jsonl'}"]
    if recipe.data.kind == "embeddings":
        return [*overrides, f"data.path={data / 'pairs.jsonl'}"]
    if recipe.data.kind == "prompts":
        return [*overrides, f"data.path={data / 'prompts.jsonl'}", "grpo.max_completion_length=2"]
    if recipe.data.kind == "kto":
        return [*overrides, f"data.path={data / 'answers.jsonl'}"]
    if recipe.data.kind == "classification":
        return [*overrides, f"data.path={data / 'reviews.jsonl'}"]
    if recipe.data.kind == "chat":
        template = REPOSITORY / "examples/chatml.jinja"
        return [*overrides, f"data.path={data / 'chats.jsonl'}", f"data.chat_template={template}"]
    name = recipe.data.path.rpartition("/")[2]
    overrides.append(f"data.path={data / name}")
    if len(recipe.data.languages) > 1:
        overrides += ["data.languages=[de, fr]", "data.shuffle_buffer=16"]
    return [*overrides, "data.subset=null"] if recipe.data.kind == "text" else overrides


def test_no_two_recipes_write_into_the_same_directory() -> None:
    directories = [load_recipe(path).training.output_dir for path in RECIPES]
    assert len(set(directories)) == len(directories)


def test_there_are_recipes() -> None:
    assert len(NAMES) >= 16
    assert {"quickstart.yaml", "translation/laptop-deep.yaml", "causal/pretrain.yaml", "causal/chat.yaml"} <= set(NAMES)


@every_recipe
def test_it_parses_and_stands_alone_once_resolved(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "resolved.yaml") == recipe


@every_recipe
def test_it_explains_itself(path: Path) -> None:
    """A comment at the top says what it is for and how to start it, or what to read first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines[:25] if line.startswith("#")]
    assert len(head) >= 1
    assert any("hf_gpipe.train" in line or ".yaml" in line for line in head)


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """The costs of a model, by what they were asked for."""
    return {}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PLANNED])
def test_it_is_planned(
    name: str,
    data: Path,
    models: Path,
    traced: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The paper's models fit the paper's devices, as their recipes say."""
    path, trace = REPOSITORY / "recipes" / name, LayerTracer.costs

    def costs_once(tracer: LayerTracer, workload: Workload) -> Any:
        # Recipes of the same model and micro-batch: one of them is traced.
        asked = f"{tracer.layers.adapter.given_config.to_json_string()} {workload} {tracer._loss}"
        if asked not in traced:
            traced[asked] = trace(tracer, workload)
        return traced[asked]

    monkeypatch.setattr(LayerTracer, "costs", costs_once)
    recipe = load_recipe(path)
    words = [f"model.path={own_model(recipe, data, models)}"] if recipe.model.path else []
    words += ["pipeline.num_stages=4"] if recipe.pipeline.offload_weights else []
    words += [f"distillation.teacher={models}"] if recipe.distillation.teacher else []
    code = plan.main([str(path), "--json", "--device", "tpu-v3", *words])
    assert code == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"]


@pytest.mark.usefixtures("no_prediction")
@every_recipe
def test_it_trains_once_it_is_small(
    path: Path,
    data: Path,
    models: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # tests/data/test_cldr.py asks 300 locales which of them can say what the recipes ask.
    monkeypatch.setattr(coverage, "_qualified", lambda names: ("de", "fr", "ko"))
    out = tmp_path / "out"
    recipe = load_recipe(path, [*tiny(path, data, models), f"training.output_dir={out}"])
    caplog.set_level(logging.ERROR, logger="hf_gpipe")
    job.run(recipe, Job.current())
    metrics = json.loads((out / "metrics.json").read_text())
    if recipe.data.kind == "kto":
        assert metrics["task"] == "kto"
        assert metrics["logps_chosen"] < 0
    elif recipe.data.kind == "preferences":
        assert metrics["task"] == "preferences"
        assert 0 <= metrics["accuracy"] <= 1
        logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert "rewards/accuracies" in logged[0]
    elif recipe.data.kind == "prompts":
        assert 0 <= metrics["reward"] <= 1
    elif recipe.data.kind in (*LABELLED, "rewards", "embeddings"):
        assert metrics["task"] == ("image classification" if recipe.data.kind == "images" else recipe.data.kind)
        assert 0 <= metrics["accuracy"] <= 1
    elif recipe.data.kind in (*SEQUENCE_KINDS, "image_text"):
        assert metrics["task"] == "language modelling"
        assert metrics["perplexity"] > 1
    else:
        assert metrics["nll"] > 0
        languages = recipe.data.languages or {"tldr-deep": ["de", "ko"]}.get(path.stem)
        assert len(metrics["per_language"]) == len(languages or metrics["per_language"])
    assert metrics["cost"]["num_stages"] == (4 if recipe.pipeline.offload_weights else 2)
    assert load_recipe(out / "recipe.yaml") == recipe
    assert list(out.glob("*.safetensors"))


@pytest.mark.usefixtures("no_prediction")
def test_the_step_that_a_run_measures_is_of_a_whole_mini_batch(
    data: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mini-batch was measured, which by length may be the one of the rows that are left over."""
    measured, measure = list[int](), job.measure_step

    def noting(pipe: Any, batches: Any, **options: Any) -> Any:
        measured.append(len(batches[0]["labels"]))
        return measure(pipe, batches, **options)

    monkeypatch.setattr(job, "measure_step", noting)
    path = REPOSITORY / "recipes/causal/chat.yaml"
    for seed in range(2):
        words = [f"training.output_dir={tmp_path / str(seed)}", f"training.seed={seed}", "training.max_steps=1"]
        job.run(load_recipe(path, [*tiny(path, data, models), *words, "training.batch_size=20"]), Job.current())
    assert measured == [20, 20]
