"""Checks across the sections of a recipe; those of one section are in its class."""

from __future__ import annotations

import os

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe.fields import Recipe, all_keys
from hf_gpipe.recipe.strict_yaml import Locations
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.settings.kinds import LABELLED, uses
from hf_gpipe.text import show


def check(recipe: Recipe, locations: Locations | None = None) -> None:
    """Raise RecipeError if sections contradict each other; the message has the keys and both values.

    Args:
        recipe: read from a file, or made in Python.
        locations: the line of each value in the file; None: made in Python.
    """
    _check_kind(recipe, locations)
    try:
        for check_some in (_check_training, _check_adapters, _check_rows, _check_precision):
            check_some(recipe)
    except RecipeError as error:
        raise RecipeError(f"{locations.source}: {error}" if locations else str(error)) from None


def _check_kind(recipe: Recipe, locations: Locations | None) -> None:
    """Raise RecipeError if a key that the kind of data does not use differs from its default.

    The default is allowed because earlier versions wrote it for every key.
    """
    kind = recipe.data.kind
    for section, key in all_keys(kind):
        value = getattr(getattr(recipe, section), key.name)
        if key.kinds is not None and not uses(kind, key.kinds) and value != key.default:
            place = f"{locations.of((section, key.name))}: " if locations else ""
            raise RecipeError(
                f"{place}{section}.{key.name} is {show(value)} and data.kind is {kind}, which does not use it; it is "
                f"for {', '.join(key.kinds)}: leave it out."
            )


def _check_training(recipe: Recipe) -> None:
    training, schedule = recipe.training, recipe.pipeline.schedule
    for check in functions_of_modes("key", "check_training"):
        try:
            check(training, schedule, f"pipeline.schedule is {schedule}", scales_loss=training.fp16)
        except UserError as error:
            raise RecipeError(f"training.{error}.") from None
    if recipe.data.streaming and training.max_steps is None:
        raise RecipeError(
            "data.streaming is true, and a stream has no end; set training.max_steps to the number of updates."
        )
    if training.packing and recipe.companion is not None:
        raise RecipeError(
            f"training.packing is true and the section {recipe.companion[0]} is given, which needs rows; leave one out."
        )


def _check_adapters(recipe: Recipe) -> None:
    model, lora = recipe.model, recipe.lora
    output_dir = os.path.abspath(recipe.training.output_dir)
    for key, path in (("model.path", model.path), ("lora.path", lora.path)):
        if path is not None and os.path.abspath(path) == output_dir:
            raise RecipeError(
                f"training.output_dir and {key} are the same directory, {path!r}, whose files the trained model would "
                "replace; choose another training.output_dir."
            )
    if model.quantization is not None and not lora.is_on:
        raise RecipeError(
            f"model.quantization is {model.quantization} and lora.r is null, so there would be nothing to train: "
            "quantised weights stay as they are; set lora.r, such as 16, or leave model.quantization out."
        )
    if recipe.data.kind == "images" and lora.r is not None and not lora.modules_to_save:
        raise RecipeError(
            f"lora.r is {lora.r}, data.kind is images and lora.modules_to_save is empty, so the head would stay as it "
            "is; name it, such as [classifier]."
        )


def _check_rows(recipe: Recipe) -> None:
    if recipe.data.kind == "image_text" and recipe.model.path is None:
        raise RecipeError(
            "data.kind is image_text and model.path is null; give a model's path, whose processor prepares the rows."
        )
    if recipe.data.kind == "kto" and recipe.training.length_bucketing:
        raise RecipeError(
            "training.length_bucketing is true and data.kind is kto, whose rows come in their order; set it to false."
        )
    if recipe.embeddings.batch_sampler == "no_duplicates" and recipe.training.length_bucketing:
        raise RecipeError(
            "training.length_bucketing is true and embeddings.batch_sampler is no_duplicates, and rows have one order; "
            "set length_bucketing to false."
        )
    if recipe.data.kind == "kto" and recipe.kto.loss_type == "kto" and recipe.training.batch_size < 2:
        raise RecipeError(
            "training.batch_size is 1 and kto.loss_type is kto, which reads answers of other rows of the mini-batch; "
            "use at least 2."
        )

    data = recipe.data
    if data.kind in LABELLED and len(set(data.labels)) < max(2, len(data.labels)):
        raise RecipeError(
            f"data.kind is {data.kind} and data.labels is {show(data.labels)}; name each class once, at least two, "
            "such as [negative, positive]."
        )


def _check_precision(recipe: Recipe) -> None:
    training, dtype = recipe.training, recipe.model.dtype
    has_copies = training.fp32_master_weights or recipe.lora.is_on
    if training.fp16 and dtype not in ("float32", *["float16"] * has_copies):
        raise RecipeError(
            "training.fp16 needs model.dtype float32, or float16 with training.fp32_master_weights or lora.r, and it "
            f"is {dtype}; set it, or use training.bf16."
        )
    if training.fp32_master_weights and dtype not in ("bfloat16", "float16"):
        raise RecipeError(
            f"training.fp32_master_weights is for weights in bfloat16 or float16, and model.dtype is {dtype}; set it "
            "to bfloat16, or leave the key out."
        )
