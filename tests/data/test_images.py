"""Images with a class: folders, Parquet files, augmentation, and a recipe with the numbers of plain transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTModel, default_data_collator
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hf_gpipe.errors import DataError, RecipeError, UnsupportedModelError, UserError
from hf_gpipe.from_recipe import job
from hf_gpipe.from_recipe.checks import check_model, checked_adapter, workload_of
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.job.job import Job
from hf_gpipe.recipe import Recipe, parse_recipe
from hf_gpipe.tasks.images import ImageExamples, image_processor_of

NAMES = ["dark", "bright", "red", "green", "blue", "grey"]
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 4}


def image(label: int, number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 60, (8, 8, 3)).astype(np.uint8)
    pixels[..., label % 3] += np.uint8(60 * (label // 3 + 1))
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of classes, and the same images in a Parquet file."""
    made, files = tmp_path_factory.mktemp("images"), []
    for number in range(60):
        name = NAMES[number % 6]
        (path := made / "folder" / name / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
        image(number % 6, number).save(path)
        files.append({"bytes": path.read_bytes(), "path": None})
    labels = [NAMES[number % 6] if number % 2 else str(number % 6) for number in range(60)]
    table = pyarrow.table({"picture": files, "kind": [number % 6 for number in range(60)], "text": labels})
    pyarrow.parquet.write_table(table, made / "rows.parquet")
    return made


def recipe(folder: Path, *overrides: str) -> Recipe:
    text = f"""
    model: {{config: {json.dumps({"model_type": "vit", "image_size": 8, **VIT})}}}
    data: {{kind: images, path: {folder}/folder, labels: {json.dumps(NAMES)}, validation_fraction: 0.2,
           test_fraction: 0.2}}
    pipeline: {{num_stages: 2, num_micro_batches: 2, device: cpu, schedule: gpipe, partition: count, recompute: stage}}
    training: {{output_dir: {folder}/out, max_steps: 8, batch_size: 8, eval_steps: 4, learning_rate: 0.02}}
    evaluation: {{batch_size: 4}}
    """
    return parse_recipe(text, overrides)


@pytest.mark.usefixtures("no_prediction")
def test_a_recipe_trains_as_plain_transformers_reads_it(folder: Path) -> None:
    given = recipe(folder)
    job.run(given, Job.current())
    out = folder / "out"
    metrics = json.loads((out / "metrics.json").read_text())
    plain = AutoModelForImageClassification.from_pretrained(out)
    assert list(plain.config.id2label.values()) == NAMES
    processor = AutoImageProcessor.from_pretrained(out, backend="pil")
    rows = ImageExamples(task_of(given).corpus(given).test, processor)
    batch = default_data_collator([rows[number] for number in range(len(rows))])
    assert batch["pixel_values"].shape[1:] == (3, 8, 8)
    with torch.no_grad():
        expected = plain.eval()(**batch)
    assert metrics["task"] == "image classification"
    assert metrics["loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    assert metrics["accuracy"] == float((expected.logits.argmax(-1) == batch["labels"]).double().mean())
    among = (expected.logits.topk(5).indices == batch["labels"][:, None]).any(1)
    assert metrics["top_5_accuracy"] == float(among.double().mean())
    lines = [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "eval_loss" in line]
    assert all("eval_accuracy" in line for line in lines)


def test_folders_and_files_are_split_and_named_alike(folder: Path) -> None:
    for words in ((), (f"data.path={folder}/rows.parquet", "data.image_field=picture", "data.label_field=kind")):
        given = recipe(folder, *words)
        corpus = task_of(given).corpus(given)
        parts = [corpus.train, corpus.validation, corpus.test]
        assert sum(map(len, parts)) == 60
        assert 24 < len(corpus.train) < 50
        for part in parts:
            for index in range(len(part)):
                pixels, label = part[index]
                assert np.asarray(pixels).mean((0, 1)).argmax() == label % 3
        few = recipe(folder, *words, "data.max_examples=30")
        corpus = task_of(few).corpus(few)
        assert sum(map(len, (corpus.train, corpus.validation, corpus.test))) == 30


def test_own_splits_stay(folder: Path, tmp_path: Path) -> None:
    for split, count in (("train", 9), ("test", 3)):
        for number in range(count):
            (path := tmp_path / split / NAMES[number % 3] / f"{number}.png").parent.mkdir(parents=True, exist_ok=True)
            image(number % 3, number).save(path)
    given = recipe(folder, f"data.path={tmp_path}", "data.validation_fraction=0.0", "training.eval_steps=null")
    corpus = task_of(given).corpus(given)
    assert [len(corpus.train), len(corpus.validation), len(corpus.test)] == [9, 0, 3]


def test_what_is_no_image_with_a_label(folder: Path, tmp_path: Path) -> None:
    words = [f"data.path={folder}/rows.parquet"]
    with pytest.raises(DataError, match=r"no field 'image'; it has picture, kind, text: set data.image_field"):
        task_of(given := recipe(folder, *words)).corpus(given)
    given = recipe(folder, *words, "data.image_field=picture", "data.label_field=text")
    with pytest.raises(DataError, match=r"field 'text' is '0'.*; it must be one of data.labels"):
        list(task_of(given).corpus(given).train)
    for name in ("dark", "bright"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"no image")
    given = recipe(folder, f"data.path={tmp_path}", "data.test_fraction=0.0", "data.validation_fraction=0.0")
    with pytest.raises(DataError, match="split train, row 0: field 'image' is no image"):
        list(task_of(given).read(given).train)
    with pytest.raises(RecipeError, match=r"data.kind is images and data.labels is .*; name each class once"):
        recipe(folder, "data.labels=[dark]")
    with pytest.raises(RecipeError, match=r"training.packing is true .* and data.kind is images"):
        recipe(folder, "training.packing=true")
    with pytest.raises(RecipeError, match=r"lora.modules_to_save is empty, so the head would stay as it is"):
        recipe(folder, "lora.r=2")
    with pytest.raises(UnsupportedModelError, match="no model of the family llama for AutoModelForImageClassification"):
        check_model(recipe(folder, "model.config={model_type: llama}"))


def test_training_images_alone_are_augmented(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Invert:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, picture: Image.Image) -> Image.Image:
            return picture.point(lambda value: self.by - value)

    stand_in: Any = ModuleType("torchvision.transforms")
    stand_in.v2 = ModuleType("v2")
    stand_in.v2.Invert = Invert
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", stand_in)
    plain, given = recipe(folder), recipe(folder, "data.augmentation={Invert: {by: 255}}")
    before, after = task_of(plain).corpus(plain), task_of(given).corpus(given)
    assert (np.asarray(after.train[3][0]) == 255 - np.asarray(before.train[3][0])).all()
    assert (np.asarray(after.test[3][0]) == np.asarray(before.test[3][0])).all()
    for transform, message in (("Invrt: {}", "did you mean 'Invert'"), ("Invert: {of: 1}", "unexpected keyword")):
        wrong = recipe(folder, f"data.augmentation={{{transform}}}")
        with pytest.raises(UserError, match=f"data.augmentation: torchvision cannot make .*{message}"):
            task_of(wrong).corpus(wrong)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(UserError, match=r"data.augmentation needs torchvision, which cannot be imported"):
        task_of(given).corpus(given)


def test_a_checkpoint_without_a_head_has_its_processor(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ViTModel(ViTConfig(image_size=16, **VIT), add_pooling_layer=False).save_pretrained(tmp_path)
    given = recipe(folder, f"model.path={tmp_path}", "model.config={}", f"training.output_dir={tmp_path}/out")
    with pytest.raises(DataError, match="there is no image processor at"):
        check_model(given)
    image_processor_of(recipe(folder, "data.image_size=16")).save_pretrained(tmp_path)
    config = checked_adapter(given).config
    assert workload_of(given, config).shapes[0][1] == (8, 3, 16, 16)
    assert config.architectures == ["ViTForImageClassification"]
    job.run(parse_recipe(given.to_yaml(), ["training.max_steps=1", "training.eval_steps=null"]), Job.current())
    trained = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert trained.num_labels == 6
