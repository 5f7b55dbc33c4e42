"""Rows of images and text as a model's processor prepares them: token ids, and the images of image tokens."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoProcessor, PreTrainedConfig, ProcessorMixin

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.families import UNREAD
from hf_gpipe.adapters.image_text import FORMS, images_of_row
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.deterministic import SPLITS
from hf_gpipe.data.fields import without_nulls
from hf_gpipe.data.hub import without_media
from hf_gpipe.data.image_files import StoredRows, as_stored, divided, splits_with_images
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError, RecipeError, UnsupportedModelError, UserError, listed, one_line
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, evaluate_text
from hf_gpipe.from_recipe.tasks import Task, evaluated
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.sources import is_here

#: Rows that are looked at for the longest: the images of each are prepared.
_SAMPLE = 64
#: Entries with a value for each token, and what fills shorter rows.
_OF_TOKENS = {"attention_mask": 0, "labels": IGNORED_LABEL, "token_type_ids": 0, "mm_token_type_ids": 0}


class ImageTextExamples:
    """A map-style dataset of rows, each with the tokens of TRL's SFTTrainer and with its images.

    Example of a row: {"input_ids": [...], "labels": [...], "pixel_values": (...)}, and what else the processor makes.
    Images are decoded and prepared when a row is asked for.

    Args:
        rows: map-style: mappings with "images", a list, or "image"; and with "messages", or "prompt" and "completion",
            or a text in `text_field`. Where messages have no places for the images, these come before the first text of
            the user's.
        processor: transformers' processor of the model.
        max_length: the most tokens of a row; None: any number.
        completion_only_loss: of a prompt and its completion, whether only the completion is learnt.
        text_field: the column of texts.
    """

    def __init__(
        self,
        rows: Any,
        processor: Any,
        *,
        max_length: int | None = None,
        completion_only_loss: bool = False,
        text_field: str = "text",
    ) -> None:
        self._rows, self._processor, self._max_length = rows, processor, max_length
        self._completion_only, self._text_field = completion_only_loss, text_field

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raise DataError for a row of another form, whose images are not those of its text, or that is too long."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"row {index}"
        try:
            row = without_nulls(self._rows[index])
        except Exception as error:  # whatever a damaged image raises, or one of too many pixels
            raise DataError(f"{where} cannot be read: {one_line(str(error), 200)}; leave it out") from error
        images = row.get("images", [row["image"]] if "image" in row else [])
        if isinstance(images, list | tuple) and any(isinstance(image, str) for image in images):
            # A processor would open it, or ask the network for it.
            raise DataError(f"{where} has the name of an image; give the image itself, as PIL opens it")
        try:
            images = [image.convert("RGB") if hasattr(image, "convert") else image for image in images]
            example = self._example(where, row, images)
        except (DataError, UserError):
            raise
        except Exception as error:  # whatever a processor or a template raises
            raise DataError(f"{where}: the processor cannot prepare it: {one_line(str(error), 200)}") from error
        if not example["input_ids"]:
            raise DataError(f"{where} has an empty text; leave it out")
        if self._max_length is not None and len(example["input_ids"]) > self._max_length:
            return self._cut(where, example, self._max_length)
        return example

    def largest(self, num_rows: int) -> dict[str, torch.Tensor] | None:
        """A mini-batch of so many times the longest of at most `_SAMPLE` rows; None: there are none."""
        drawn = [self[index] for index in range(0, len(self), -(-len(self) // _SAMPLE))]
        if not drawn:
            return None
        return ImageTextCollator(0)([max(drawn, key=lambda row: len(row["input_ids"]))] * num_rows)

    def _example(self, where: str, row: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
        if "messages" in row:
            return self._prepared(self._render(_with_places(where, row["messages"], len(images))), images)
        if isinstance(text := row.get(self._text_field), str):
            return self._prepared(text, images)
        if not {"prompt", "completion"} <= row.keys():
            raise DataError(
                f"{where} has none of 'messages', 'prompt' with 'completion', and a text in {self._text_field!r}; the "
                f"columns found are {listed(list(map(str, row)))}"
            )
        prompt, completion = row["prompt"], row["completion"]
        if not isinstance(prompt, str):
            before = _with_places(where, prompt, len(images))
            whole = self._render([*before, *_with_places(where, completion, 0)])
            prompt = self._render(before, add_generation_prompt=True)
            if not whole.startswith(prompt):
                raise DataError(
                    f"{where}: with the completion the chat template writes the prompt in another way; give messages"
                )
            completion = whole[len(prompt) :]
        example, after = self._prepared(prompt, images), self._prepared(completion, [])
        if self._completion_only:
            example["labels"] = [IGNORED_LABEL] * len(example["labels"])
        for name in ("input_ids", *_OF_TOKENS):
            if name in example:
                example[name] = example[name] + after.get(name, [0] * len(after["input_ids"]))
        return example

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text: str = self._processor.apply_chat_template(messages, tokenize=False, **options)
        return text

    def _prepared(self, text: str, images: list[Any]) -> dict[str, Any]:
        """The row of a text. The chat template has written the tokens of its beginning and end."""
        made = self._processor(
            text=[text], **({"images": [images]} if images else {}), add_special_tokens=False, return_tensors="pt"
        )
        example: dict[str, Any] = {}
        for name, tensor in made.items():
            if not isinstance(tensor, torch.Tensor):
                raise DataError(f"{name!r}, an entry that {type(self._processor).__name__} makes, is no tensor")
            is_of_tokens = name == "input_ids" or name in _OF_TOKENS
            example[name] = tensor[0].tolist() if is_of_tokens else tensor
        example.pop("attention_mask", None)
        return {**example, "labels": list(example["input_ids"])}

    def _cut(self, where: str, example: dict[str, Any], most: int) -> dict[str, Any]:
        token = getattr(self._processor, "image_token_id", None)
        if token in example["input_ids"][most:]:
            raise DataError(
                f"{where} has {len(example['input_ids'])} tokens, and max_length={most} would cut its images off; "
                "raise max_length, or give smaller images"
            )
        return {n: values[:most] if n == "input_ids" or n in _OF_TOKENS else values for n, values in example.items()}


def image_text_corpus(data: DataSection, evaluated: Collection[str] = ("validation", "test")) -> Corpus[Any]:
    """The rows of `data.path` in three splits, images not decoded yet.

    Splits that the data set has not are cut off by a hash of the texts of each row (`divided`).

    Args:
        data: the section, of the kind "image_text".
        evaluated: the splits to evaluate on; of a data set's own splits the others are left empty.

    Raises:
        DataError: no such data set, rows without images, or nothing to train on.
    """
    splits = splits_with_images(data)
    for name, is_list in (("images", True), ("image", False)):
        if name in splits["train"].column_names:
            splits = as_stored(splits, str(data.path), name, is_list=is_list)
            break
    else:
        columns = listed(splits["train"].column_names)
        raise DataError(f"{data.path} has no field 'images' or 'image'; it has {columns}")
    texts = splits["train"].remove_columns(name).with_format("arrow")
    decode = without_media(texts.features).decode_example

    def text_of(number: int) -> str:
        return json.dumps(decode(texts[number].to_pylist()[0]), sort_keys=True, default=str)

    parts = divided(splits, data, text_of, "rows", evaluated)
    rows_of: list[Any] = [StoredRows(parts[split], str(data.path), name) for split in SPLITS]
    return Corpus(*rows_of)


def _with_places(where: str, messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Messages whose contents are lists, with places for so many images, as TRL makes them."""
    placed, has_places = [], False
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            places = [] if has_places or message["role"] != "user" else [{"type": "image"}] * count
            has_places = has_places or message["role"] == "user"
            content = [*places, {"type": "text", "text": content}]
        parts = content or []
        if unread := {part.get("type") for part in parts} - {"text", "image"}:
            raise DataError(
                f"{where} has a part of the type {unread.pop()!r} in its messages; parts are 'text' or 'image': leave "
                "the others out"
            )
        placed.append({**message, "content": parts})
    if (places := sum(part.get("type") == "image" for turn in placed for part in turn["content"])) != count:
        raise DataError(f"{where} has {count} images, and its messages have places for {places}")
    return placed


@dataclass(frozen=True)
class ImageTextCollator:
    """Mini-batches of rows of `ImageTextExamples`: tokens padded on the right, and the images of all rows.

    Attributes:
        pad_token_id: fills input_ids.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Raise DataError where an entry is missing in some of the rows, or in some of those with images."""
        longest = max(len(row["input_ids"]) for row in rows)
        given = [{"attention_mask": [1] * len(row["input_ids"]), **row} for row in rows]
        with_images = [row for row in given if any(isinstance(value, torch.Tensor) for value in row.values())]
        batch = {}
        for name, filler in {"input_ids": self.pad_token_id, **_OF_TOKENS}.items():
            if _in_all(name, given):
                batch[name] = torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in given])
        others = dict.fromkeys(name for row in given for name in row if name not in batch)
        for name in others:
            _in_all(name, with_images)  # rows without images have no such entry
            parts = [row.get(name) for row in given]
            # A row's own images (1, images, ...), or those of all rows one after the other.
            is_of_rows = name.startswith("pixel_") and any(
                part is not None and part.dim() == 5 for row in given if (part := row.get("pixel_values")) is not None
            )
            batch[name] = _filled(parts) if is_of_rows else torch.cat([part for part in parts if part is not None])
        return batch


def _in_all(name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rows have an entry. Raises DataError where some have it and others do not."""
    lack = [number for number, row in enumerate(rows) if name not in row]
    if 0 < len(lack) < len(rows):
        raise DataError(
            f"the processor made {name!r} for some rows of a mini-batch, and not for others, such as that with the "
            f"entries {', '.join(rows[lack[0]])}; let it make the same entries for all"
        )
    return not lack


def _filled(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The images of rows, each (1, images, ..., H, W) or None, with zeros up to the most and the largest: (N, ...)."""
    largest = [max(sizes) for sizes in zip(*(part.shape for part in parts if part is not None), strict=True)]
    first = next(part for part in parts if part is not None)
    whole = []
    for part in parts:
        given = first.new_zeros(largest) if part is None else part
        missing = [most - size for most, size in zip(largest, given.shape, strict=True)]
        whole.append(F.pad(given, [pad for more in reversed(missing) for pad in (0, more)]))
    return torch.cat(whole)


def read_processor(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The processor of a directory or Hub id, whose images PIL prepares. Raises DataError where there is none."""
    try:
        is_here(source)
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code, backend="pil")
    except Exception as error:  # the library raises whatever a broken file, or a missing one, makes it do
        raise DataError(f"there is no processor at {str(source)!r}: {one_line(str(error), 300)}") from error
    if not isinstance(processor, ProcessorMixin):
        raise DataError(f"at {str(source)!r} is a {type(processor).__name__}, and rows with images need a processor")
    return processor


def blank_row(processor: Any, num_images: int) -> dict[str, torch.Tensor]:
    """A mini-batch of one row with so many blank images of 1024 by 1024 pixels, for the planner."""
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant")]
    images = [Image.new("RGB", (1024, 1024)) for _ in range(num_images)]
    row: dict[str, Any] = {"images": images, "messages": turns}
    if processor.chat_template is None:
        row = {"images": images, "text": " ".join([processor.image_token] * num_images)}
    return ImageTextCollator(0)([ImageTextExamples([row], processor)[0]])


def image_text_processor_of(recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
    """The processor of images and text: a resumed run's own, or that of `model.path`."""
    assert recipe.model.path is not None, "it was checked"
    return read_processor(checkpoint or recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)


class _ImageText(Task):
    rows_in_words, evaluating = "rows of images and text", "predicting the text beside images"

    def read(self, recipe: Recipe) -> Corpus[Any]:
        return image_text_corpus(recipe.data, evaluated(recipe))

    def processor(self, recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
        return image_text_processor_of(recipe, corpus, checkpoint)

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> ImageTextExamples:
        data = recipe.data
        return ImageTextExamples(
            split,
            processor,
            max_length=data.max_length,
            completion_only_loss=data.completion_only_loss and "completion" in split.features,
            text_field=data.text_field,
        )

    def collator(self, processor: Any, pipe: Pipeline) -> ImageTextCollator:
        return ImageTextCollator(PairCollator.for_tokenizer(processor.tokenizer).pad_token_id)

    def workload(self, recipe: Recipe, config: PreTrainedConfig) -> Workload:
        """Raise UserError where images of the family are not read, or those of a row are too long."""
        data = recipe.data
        if config.model_type not in FORMS:
            reason = UNREAD.get(config.model_type, "no one has compared them with the plain model's")
            raise UnsupportedModelError(
                f"data.kind is image_text, and images of the family {config.model_type} are not read: {reason}; choose "
                f"another, such as {', '.join(sorted(FORMS)[:4])}"
            )
        images = images_of_row(config, blank_row(image_text_processor_of(recipe), data.images_per_row))
        if (most := images.places[-1] + 1) > data.max_length:
            raise RecipeError(
                f"data.max_length is {data.max_length}, and data.images_per_row {data.images_per_row} take {most} "
                "tokens; raise max_length"
            )
        return replace(super().workload(recipe, config), row_images=images)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        return evaluate_text(pipe, held_out, ImageTextCollator(0))


TASK = _ImageText()
