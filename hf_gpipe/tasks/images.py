"""Images with a label: directories of classes, Parquet files or a data set of the Hub, as `datasets` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, default_data_collator

from hf_gpipe.data.deterministic import SPLITS
from hf_gpipe.data.fields import class_of
from hf_gpipe.data.image_files import StoredRows, as_stored, divided, splits_with_images
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError, UserError, listed, nearest, one_line
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, accuracy, measure_classes
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.from_recipe.tasks import Task, evaluated
from hf_gpipe.libraries.transformers import IMAGE_PROCESSOR_MAPPING_NAMES, AutoImageProcessor
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.sources import is_here
from hf_gpipe.training.loader import Collate

Augment = Callable[[Any], Any]


class Images:
    """A map-style dataset of (image of PIL in RGB, number of its class).

    Args:
        rows: `StoredRows`.
        data: the section, of the kind "images".
        name: of the split, in messages.
        augment: changes an image.
    """

    def __init__(self, rows: Any, data: DataSection, name: str, augment: Augment | None = None) -> None:
        self._rows, self._data, self._name, self._augment = rows, data, name, augment
        #: The names of the classes by their numbers in the data, where these have names.
        self._names: Sequence[str] | None = getattr(rows.features[data.label_field], "names", None)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where, data = f"{self._name}, row {index}", self._data
        try:
            row = self._rows[index]
            image = row[data.image_field].convert("RGB")
        except Exception as error:  # whatever a damaged file raises
            raise DataError(f"{where}: field {data.image_field!r} is no image: {one_line(str(error), 200)}") from error
        label = row[data.label_field]
        if self._names is not None and isinstance(label, int) and 0 <= label < len(self._names):
            label = self._names[label]
        number = class_of(where, label, data.labels, data.label_field)
        return image if self._augment is None else self._augment(image), number


class ImageExamples:
    """A map-style dataset of {"pixel_values": (C, H, W), "labels": class}.

    Args:
        images: of a split of a corpus.
        processor: transformers' image processor.
    """

    def __init__(self, images: Images, processor: Any) -> None:
        self._images, self._processor = images, processor

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self._images[index]
        return {"pixel_values": pixels_of(image, self._processor), "labels": label}


def pixels_of(image: Any, processor: Any) -> torch.Tensor:
    """The pixels that the model reads of an image, (C, H, W)."""
    pixels: torch.Tensor = processor(image, return_tensors="pt")["pixel_values"][0]
    return pixels


def shape_read(processor: Any) -> torch.Tensor:
    """The pixels, (C, H, W), that the model reads of an image of any size."""
    return pixels_of(np.zeros((64, 64, 3), dtype=np.uint8), processor)


def image_corpus(data: DataSection, evaluated: Collection[str] = ("validation", "test")) -> Corpus[Any]:
    """The images of `data.path` in three splits.

    An image is known by its file's name or its bytes, by a hash of which splits are cut off (`divided`).

    Args:
        data: the section, of the kind "images".
        evaluated: the splits to evaluate on; of a data set's own splits the others are left empty.

    Raises:
        DataError: no such data set, it lacks a field, or there is nothing to train on.
        UserError: torchvision, which augments, is not installed.
    """
    path, augment = str(data.path), augmentation_of(data.augmentation)
    splits = splits_with_images(data)
    for name in (data.image_field, data.label_field):
        if name not in (columns := splits["train"].column_names):
            raise DataError(
                f"{path} has no field {name!r}; it has {listed(columns)}: set data.image_field and data.label_field"
            )
    splits = as_stored(splits, path, data.image_field)
    files = splits["train"].select_columns([data.image_field])

    def text_of(number: int) -> str:
        file = files[number][data.image_field] or {}
        name, content = Path(file.get("path") or ""), file.get("bytes")
        return f"{name.parent.name}/{name.name}" if content is None else hashlib.blake2b(content).hexdigest()

    parts = divided(splits, data, text_of, "images", evaluated)
    images: list[Any] = [
        Images(
            StoredRows(parts[name], path, data.image_field),
            data,
            f"{path}, split {name}",
            augment if name == "train" else None,
        )
        for name in SPLITS
    ]
    return Corpus(*images)


def augmentation_of(transforms: Mapping[str, Any]) -> Augment | None:
    """torchvision's transforms (`torchvision.transforms.v2`), one after the other; None: there are none.

    Args:
        transforms: the arguments of each class, by its name.

    Raises:
        UserError: torchvision is not installed, or has no such transform.
    """
    if not transforms:
        return None
    try:
        from torchvision.transforms import v2  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"data.augmentation needs torchvision, which cannot be imported ({one_line(str(error), 200)}); install the "
            "release for this torch, or leave data.augmentation out"
        ) from error
    made = []
    for name, values in transforms.items():
        try:
            made.append(getattr(v2, name)(**(values or {})))
        except (AttributeError, TypeError, ValueError) as error:
            known = [kind for kind in dir(v2) if kind[0].isupper()]
            hint = nearest(name, known) if name not in known else f": {error}"
            raise UserError(f"data.augmentation: torchvision cannot make {name}({values}){hint}; correct it") from error

    def augment(image: Any) -> Any:
        for transform in made:
            image = transform(image)
        return image

    return augment


def image_processor(source: str | Path | None, config: PreTrainedConfig, image_size: int | None) -> Any:
    """transformers' image processor, by PIL, so that a run does not depend on whether torchvision is installed.

    Args:
        source: a directory or Hub id that has one; None: the default one of the model's family.
        config: the model's.
        image_size: rows and columns of the images that the model reads; None: the processor's own.

    Raises:
        DataError: there is none.
    """
    try:
        if source is not None:
            is_here(source)
            read = AutoImageProcessor.from_pretrained(source, backend="pil")
            return read if image_size is None else type(read)(**{**read.to_dict(), **_sizes(read, image_size)})
        names = IMAGE_PROCESSOR_MAPPING_NAMES[config.model_type]
        made_as = getattr(transformers, names["pil"])
        size = image_size or getattr(config, "image_size", None)
        return made_as(**_sizes(made_as(), size)) if isinstance(size, int) else made_as()
    except Exception as error:  # the library raises whatever a broken file, or a missing one, makes it do
        where = f"at {str(source)!r}" if source is not None else f"of the family {config.model_type}"
        raise DataError(f"there is no image processor {where}: {one_line(str(error), 300)}") from error


def _sizes(processor: Any, size: int) -> dict[str, Any]:
    square = {"height": size, "width": size}
    sizes: dict[str, Any] = {"size": {"shortest_edge": size} if "shortest_edge" in dict(processor.size) else square}
    if getattr(processor, "crop_size", None) is not None:
        sizes["crop_size"] = square
    return sizes


def image_processor_of(recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
    """The image processor: a resumed run's own, that of `model.path`, or the default one of the model's family."""
    size = recipe.data.image_size if checkpoint is None else None
    return image_processor(checkpoint or recipe.model.path, model_config(recipe, None), size)


class _Images(Task):
    items, evaluating, head = "images", "classifying the images", "images"

    def read(self, recipe: Recipe) -> Corpus[Any]:
        return image_corpus(recipe.data, evaluated(recipe))

    def size(self, data: DataSection, corpus: Any) -> str:
        return f"{len(corpus.train)} training images, {len(data.labels)} classes"

    def processor(self, recipe: Recipe, corpus: Any = None, checkpoint: Path | None = None) -> Any:
        return image_processor_of(recipe, corpus, checkpoint)

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> ImageExamples:
        return ImageExamples(split, processor)

    def collator(self, processor: Any, pipe: Pipeline) -> Collate:
        return default_data_collator

    def given(self, recipe: Recipe) -> Mapping[str, Any]:
        return {"compute_metrics": accuracy}

    def workload(self, recipe: Recipe, config: PreTrainedConfig) -> Workload:
        pixels = shape_read(image_processor_of(recipe))
        entries = {"pixel_values": pixels[None], "labels": torch.zeros(1, dtype=torch.long)}
        return Workload.from_entries(entries).with_rows(recipe.training.batch_size)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        """The report of classes, with the share of rows whose class is among the five most likely ones."""
        values = measure_classes(pipe, held_out, default_data_collator, top=5)
        return HeldOutReport("image classification", values, ("images", f"{values['num_rows']} images"))


TASK = _Images()
