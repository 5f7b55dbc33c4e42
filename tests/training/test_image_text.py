"""Rows of images and text: the mini-batches of a processor, and a training that is the plain model's."""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Idefics3Processor,
    LlavaProcessor,
)

# From its own module: without torchvision, transformers 5.17 offers it nowhere else.
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from hf_gpipe import PipelineSFTConfig, PipelineSFTTrainer
from hf_gpipe.data import image_files
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.from_recipe import job
from hf_gpipe.from_recipe.checks import check_model
from hf_gpipe.job.job import Job
from hf_gpipe.recipe import DataSection, parse_recipe
from hf_gpipe.tasks.image_text import ImageTextCollator, ImageTextExamples, image_text_corpus
from hf_gpipe.tasks.images import image_corpus
from tests.data.chat_templates import tokenizer
from tests.image_text_families import clone, parts_of, run_plain

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: By family the image token. Those of Qwen2-VL need torchvision.
TOKENS = {"llava": "<image>", "idefics3": "<image>"}


def processor(family: str) -> Any:
    text = tokenizer()
    text.add_special_tokens({"additional_special_tokens": [TOKENS[family], "<fake_token_around_image>"]})
    text.pad_token = "</s>"
    options = {"chat_template": TEMPLATE.replace("IMAGE", TOKENS[family])}
    side = {"height": 16, "width": 16}
    if family == "llava":
        images = CLIPImageProcessorPil(size=side, crop_size=side)
        return LlavaProcessor(
            images,
            text,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            **options,
        )
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": 16}, max_image_size={"longest_edge": 16}
    )
    return Idefics3Processor(images, text, image_seq_len=4, **options)


def picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def rows(kind: str, counts: tuple[int, ...] = (2, 0, 1, 1)) -> list[dict[str, Any]]:
    found = []
    for number, count in enumerate(counts):
        user, assistant = (
            {"role": role, "content": f"{role} {'says ' * (number + 1)}"} for role in ("user", "assistant")
        )
        images = [picture(10 * number + one, (16, 24) if one else (16, 16)) for one in range(count)]
        texts: dict[str, Any] = {"messages": [user, assistant]}
        if kind == "completion":
            texts = {"prompt": [user], "completion": [assistant]}
        found.append({"images": images, **texts})
    return found


@pytest.mark.parametrize("kind", ["messages", "completion"])
@pytest.mark.parametrize("family", TOKENS)
def test_a_mini_batch_is_trl_s(family: str, kind: str) -> None:
    made, completion_only = processor(family), kind == "completion"
    examples = ImageTextExamples(rows(kind), made, completion_only_loss=completion_only)
    found = ImageTextCollator(made.tokenizer.pad_token_id)(list(examples))
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    collate = sft.DataCollatorForVisionLanguageModeling(made, completion_only_loss=completion_only)
    expected = dict(collate(rows(kind)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_step_of_the_trainer_is_the_plain_model_s(tmp_path: Any) -> None:
    model, made = clone("llava"), processor("llava")
    model.config.image_token_id = made.tokenizer.convert_tokens_to_ids(TOKENS["llava"])
    model.resize_token_embeddings(len(made.tokenizer))
    plain = copy.deepcopy(model)
    args = PipelineSFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        num_stages=2,
        num_micro_batches=2,
        logging_steps=1,
        use_cpu=True,
        lr_scheduler_type="constant",
        report_to="none",
    )
    trainer = PipelineSFTTrainer(model, args, train_dataset=rows("messages"), processing_class=made)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    batch = ImageTextCollator(made.tokenizer.pad_token_id)(list(ImageTextExamples(rows("messages"), made)))
    expected = run_plain(plain, parts_of(batch, (2, 0, 1, 1), 1))
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.loss, abs=1e-9)
    read = type(model).from_pretrained(tmp_path / "saved", dtype=torch.float64)
    weight = "model.vision_tower.embeddings.patch_embedding.weight"
    change = dict(plain.named_parameters())[weight] - 0.1 * expected.gradients[weight]
    assert torch.allclose(dict(read.named_parameters())[weight], change, atol=1e-9)
    assert (tmp_path / "saved" / "processor_config.json").exists()


def test_a_recipe_learns_from_parquet_files(tmp_path: Path) -> None:
    model, made = clone("llava", torch.float32), processor("llava")
    model.config.image_token_id = made.tokenizer.convert_tokens_to_ids(TOKENS["llava"])
    model.resize_token_embeddings(len(made.tokenizer))
    model.save_pretrained(tmp_path / "model")
    made.save_pretrained(tmp_path / "model")
    given = rows("completion", (1, 2, 0, 1) * 5)
    for row in given:
        files = [io.BytesIO() for _ in row["images"]]
        for image, file in zip(row["images"], files, strict=True):
            image.save(file, format="PNG")
        row["images"] = [{"bytes": file.getvalue(), "path": None} for file in files]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), tmp_path / "rows.parquet")
    text = f"""
model: {{path: {tmp_path}/model}}
data: {{kind: image_text, path: {tmp_path}/rows.parquet, max_length: 160, validation_fraction: 0.2, test_fraction: 0.2}}
training: {{output_dir: {tmp_path}/out, batch_size: 4, max_steps: 2, eval_steps: 2}}
evaluation: {{batch_size: 2}}
pipeline: {{num_stages: 2, num_micro_batches: 2, partition: count, schedule: 1f1b, recompute: none, device: cpu}}
"""
    job.run(parse_recipe(text), Job.current())
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_rows"] > 0
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "out").config.model_type == "llava"
    for old, new, message in (
        (f"path: {tmp_path}/model", "config: {model_type: llava}", "give a model's path"),
        ("max_length: 160", "max_length: 8", r"take .* tokens; raise max_length"),
    ):
        with pytest.raises(UserError, match=message):
            check_model(parse_recipe(text.replace(old, new)))


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"images": [picture(0)], "messages": [{"role": "assistant", "content": "a"}]}, {}, "places for 0"),
        ({"images": [picture(0)]}, {}, "has none of"),
        ({"images": [picture(0)], "text": "<image> a"}, {"max_length": 8}, "cut its images off"),
        ({"images": ["http://127.0.0.1:1/a.png"], "text": "<image> a"}, {}, "the name of an image"),
        ({"images": [None], "text": "<image> a"}, {}, "cannot prepare it"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, {}, "of the type 'video'"),
        ({"text": ""}, {}, "empty text"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageTextExamples([row], processor("llava"), **options)[0]


def test_no_entry_of_a_row_is_dropped() -> None:
    """TRL's collator raises a KeyError for it."""
    first, second = ({"input_ids": [5, 6], "labels": [5, 6], "token_type_ids": [0, 1]} for _ in range(2))
    pixels, grid = torch.zeros(4, 3), torch.ones(1, 3, dtype=torch.long)
    with_images = {**first, "pixel_values": pixels, "image_grid_thw": grid}
    found = ImageTextCollator(0)([with_images, second, with_images])
    assert found["token_type_ids"].shape == (3, 2)
    assert found["image_grid_thw"].shape == (2, 3)
    for rows_, name in (
        ([first, {n: one for n, one in second.items() if n != "token_type_ids"}], "token_type_ids"),
        ([with_images, second, {**first, "pixel_values": pixels}], "image_grid_thw"),
    ):
        with pytest.raises(DataError, match=f"made '{name}' for some rows"):
            ImageTextCollator(0)(rows_)


@pytest.mark.parametrize("kind", ["images", "image_text"])
def test_a_table_opens_files_of_its_own_folder_alone(tmp_path: Path, kind: str) -> None:
    """A row may have a path in place of an image's bytes."""
    (tmp_path / "data").mkdir()
    for folder in ("data", "."):
        picture(0).save(tmp_path / folder / "a.png")
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.png", "a.png")
    paths = ["a.png", str(tmp_path / "a.png"), "../a.png", "link.png", "http://127.0.0.1:1/a.png"]
    paths += [f"zip://a.png::{tmp_path}/a.zip"]
    images = [{"bytes": None, "path": path} for path in paths] + [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": None}]
    others = [*images[1:], images[0]]
    table: dict[str, Any] = {"image": images, "label": [0] * 7, "text": ["a"] * 7}
    # Columns that no one asks for name files elsewhere, and so does a part of a message; row 0 opens none of them.
    table |= {"other": others, "messages": [[one] for one in others]}
    image = datasets.Image()
    features = {"image": image, "label": datasets.Value("int64"), "text": datasets.Value("string")}
    schema = datasets.Features({**features, "other": image, "messages": datasets.List(image)}).arrow_schema
    pyarrow.parquet.write_table(pyarrow.table(table, schema), tmp_path / "data" / "rows.parquet")
    path = str(tmp_path / "data" / "rows.parquet")
    data = DataSection(kind=kind, path=path, labels=["x"], validation_fraction=0.0, test_fraction=0.0)
    rows_ = {"images": image_corpus, "image_text": image_text_corpus}[kind](data).train
    image = rows_[0][0] if kind == "images" else rows_[0]["image"]
    assert np.array_equal(image, picture(0))
    for number in range(1, 6):
        with pytest.raises(DataError, match="is not in the folder of the data"):
            rows_[number]
    with pytest.raises(DataError, match="its image is PostScript, which is a program and is not run"):
        rows_[6]


def test_files_that_datasets_has_found_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an archive of the folder, and of a data set of the Hub in the folder of downloads, which has links."""
    for folder in ("data", "hub/blobs", "hub/snapshots"):
        (tmp_path / folder).mkdir(parents=True)
    picture(0).save(tmp_path / "hub" / "blobs" / "1", "PNG")
    (tmp_path / "hub" / "snapshots" / "a.png").symlink_to("../blobs/1")
    with zipfile.ZipFile(tmp_path / "data" / "train.zip", "w") as archive:
        archive.write(tmp_path / "hub" / "blobs" / "1", "a.png")
        archive.writestr("metadata.jsonl", '{"file_name": "a.png", "label": 0}')
    of_hub = {"image": [str(tmp_path / "hub" / "snapshots" / "a.png")], "label": [0]}
    hub = datasets.DatasetDict({"train": datasets.Dataset.from_dict(of_hub)})
    read = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: hub if path == "its/name" else read(path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in (str(tmp_path / "data"), "its/name"):
        data = DataSection(kind="images", path=path, labels=["x"], validation_fraction=0.0, test_fraction=0.0)
        assert np.array_equal(image_corpus(data).train[0][0], picture(0))


@pytest.mark.parametrize("name", ["a.png", "zip://a.png::a.zip"])
def test_an_image_has_a_limit_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A member of an archive is not unpacked first: it can be a thousand times as large as the archive."""
    monkeypatch.setattr(image_files, "MOST_BYTES", 1 << 20)
    picture(0).save(tmp_path / "b.png")
    (tmp_path / "a.png").write_bytes(bytes(1 + (1 << 20)))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "a.png", "a.png")
        archive.write(tmp_path / "b.png", "b.png")
    column = datasets.Features({"image": datasets.Image()}).arrow_schema
    rows_ = {"image": [{"bytes": None, "path": one} for one in (name, name.replace("a.png", "b.png"))]}
    pyarrow.parquet.write_table(pyarrow.table(rows_, column), tmp_path / "rows.parquet")
    stored = image_files.StoredRows(
        datasets.load_dataset("parquet", data_files=str(tmp_path / "rows.parquet"))["train"].cast_column(
            "image", datasets.Image(decode=False)
        ),
        str(tmp_path / "rows.parquet"),
        "image",
    )
    assert np.array_equal(stored[1]["image"], picture(0))
    with pytest.raises(DataError, match="of 1 MiB; an image has at most 1 MiB, so make it smaller"):
        stored[0]


def test_a_damaged_image_is_an_error_of_its_row() -> None:
    """Images of a table are decoded when their row is read; a small file may claim 3.6e9 pixels."""
    size = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(one)) + name + one + struct.pack(">I", zlib.crc32(name + one)) for name, one in parts
    ]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    table = datasets.Dataset.from_list([{"images": [{"bytes": one, "path": None}]} for one in (b"no image", bomb)])
    examples = ImageTextExamples(table.cast_column("images", datasets.List(datasets.Image())), processor("llava"))
    for number, message in enumerate(("cannot identify image", "exceeds limit")):
        with pytest.raises(DataError, match=f"row {number} cannot be read: .*{message}"):
            examples[number]


def test_options_that_are_refused(tmp_path: Any) -> None:
    args = PipelineSFTConfig(output_dir=str(tmp_path), use_cpu=True, num_stages=1, assistant_only_loss=True)
    with pytest.raises(UserError, match="assistant_only_loss is for rows of text alone"):
        PipelineSFTTrainer(clone("llava"), args, train_dataset=rows("messages"), processing_class=processor("llava"))
    args = PipelineSFTConfig(output_dir=str(tmp_path), use_cpu=True, num_stages=1)
    with pytest.raises(UserError, match="give the model's processor"):
        PipelineSFTTrainer(clone("llava"), args, train_dataset=rows("messages"), processing_class=tokenizer())
