"""Checks across the fields of a recipe."""

from __future__ import annotations

from hf_gpipe.errors import RecipeError
from hf_gpipe.recipe.data import LABELLED, PAIRED_KINDS, ROW_LENGTH_KINDS, DataSection
from hf_gpipe.recipe.fields import LoraSection, ModelSection, Recipe, all_keys
from hf_gpipe.recipe.losses import DistillationSection, unused_by_loss
from hf_gpipe.recipe.pipeline import PipelineConfig
from hf_gpipe.recipe.section import keys_of
from hf_gpipe.recipe.strict_yaml import Locations
from hf_gpipe.recipe.training import TrainingSection
from hf_gpipe.recipe.transformer import with_transformer
from hf_gpipe.recipe.words import show
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES

#: Kinds of data that need a path -> what it is the path of.
_PATHS = {
    "jsonl": "the file, one JSON object per line",
    "csv": "the file, whose first line names the columns",
    "parquet": "the file",
    "parallel": "the file with a source on each line",
    "hub": "the id of a data set of the Hub, or a directory of that form",
}
#: Kinds that need files of these names, or a data set of the Hub.
_FILES = {
    "text": ".txt, .jsonl or .parquet",
    **dict.fromkeys(ROW_LENGTH_KINDS, ".jsonl, .json or .parquet"),
    "images": "a directory of images, or .parquet",
    "image_text": ".parquet",
}


def check(recipe: Recipe, locations: Locations | None = None) -> None:
    """Raise RecipeError if fields contradict each other; the message has the keys and both values.

    Args:
        recipe: read from a file, or made in Python.
        locations: the line of each value in the file; None: made in Python.
    """
    _check_kind(recipe, locations)
    try:
        _check_fields(recipe)
    except RecipeError as error:
        raise RecipeError(f"{locations.source}: {error}" if locations else str(error)) from None


def _check_kind(recipe: Recipe, locations: Locations | None) -> None:
    """Raise RecipeError if a key that the kind of data does not use differs from its default.

    The default is allowed because earlier versions wrote it for every key.
    """
    kind = recipe.data.kind
    for section, key in all_keys():
        value = getattr(getattr(recipe, section), key.name)
        if key.kinds is not None and kind not in key.kinds and value != key.default:
            place = f"{locations.of((section, key.name))}: " if locations else ""
            raise RecipeError(
                f"{place}{section}.{key.name} is {show(value)} and data.kind is {kind}, which does not use it; it is "
                f"for {', '.join(key.kinds)}: leave it out."
            )


def _check_fields(recipe: Recipe) -> None:
    _check_model(recipe.model)
    _check_devices(recipe.pipeline)
    _check_data(recipe.data)
    _check_rows(recipe.data)
    _check_streaming(recipe)
    _check_preferences(recipe)
    _check_distillation(recipe)
    _check_grpo(recipe)
    _check_classification(recipe)
    _check_image_text(recipe)
    _check_precision(recipe)
    _check_quantization(recipe)
    training = recipe.training
    if training.on_nonfinite_loss == "skip" and recipe.pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        raise RecipeError(
            f"training.on_nonfinite_loss is skip and pipeline.schedule is {recipe.pipeline.schedule}: the loss of a "
            "step is known after most stages have updated; use stop or ignore, or a synchronous schedule, such as 1f1b."
        )
    for name in ("hub_model_id", "hub_private_repo"):
        if getattr(training, name) is not None and not training.push_to_hub:
            raise RecipeError(
                f"training.{name} is {show(getattr(training, name))} and training.push_to_hub is false; set it to "
                f"true, or leave {name} out."
            )
    _check_best_model(training)
    if training.decay_steps and training.lr_scheduler_type != "warmup_stable_decay":
        raise RecipeError(
            f"training.decay_steps is {training.decay_steps} and training.lr_scheduler_type is "
            f"{training.lr_scheduler_type}, which does not use it; use warmup_stable_decay, or leave it out."
        )


def _check_best_model(training: TrainingSection) -> None:
    every, saved = training.eval_steps, training.save_steps
    if training.load_best_model_at_end and (every is None or saved != every):
        raise RecipeError(
            f"training.load_best_model_at_end is true, training.eval_steps is {show(every)} and training.save_steps is "
            f"{show(saved)}; every model that is evaluated must have a checkpoint: set both to the same number."
        )


def _check_model(model: ModelSection) -> None:
    model_type = model.config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise RecipeError(f"model.config.model_type is {model_type!r}; it must be a name such as marian or llama.")
    if model.path is None and not model_type:
        raise RecipeError(
            "the model is missing; give model.path (a Hub id or a directory) for its weights, or "
            "model.config.model_type (marian, llama, ...) with the fields of its config for a new model."
        )
    if model.path is not None and model.transformer is not None:
        raise RecipeError(
            f"model.transformer is {model.transformer!r} and model.path is {model.path!r}, whose model has a size "
            "already; leave one of them out."
        )
    if model.path is not None and model.depth_scaled_feed_forward:
        raise RecipeError(
            f"model.depth_scaled_feed_forward is for a new model, and model.path is {model.path!r}, whose weights are "
            "loaded; leave one of them out."
        )
    if model.transformer is not None:
        with_transformer(model.config, model.transformer)


def _check_quantization(recipe: Recipe) -> None:
    model, lora = recipe.model, recipe.lora
    if model.quantization is not None and not lora.is_on:
        raise RecipeError(
            f"model.quantization is {model.quantization} and lora.r is null, so there would be nothing to train: "
            "quantised weights stay as they are; set lora.r, such as 16, or leave model.quantization out."
        )
    if model.double_quantization and model.quantization not in ("nf4", "fp4"):
        raise RecipeError(
            "model.double_quantization is for model.quantization nf4 and fp4, and it is "
            f"{model.quantization or 'null'}; leave it out, or set one of them."
        )
    if model.quantization is not None and model.dtype == "float64":
        raise RecipeError(
            "model.quantization is for model.dtype float32, bfloat16 or float16, and it is float64; set bfloat16."
        )
    if model.quantization is not None and model.depth_scaled_feed_forward:
        raise RecipeError(
            "model.depth_scaled_feed_forward is for new weights that are trained, and model.quantization is "
            f"{model.quantization}; leave one of them out."
        )
    for key in keys_of(LoraSection).values() if lora.r is None or lora.path is not None else ():
        if key.name == "path" or (value := getattr(lora, key.name)) == key.default:
            continue
        if lora.path is not None:
            raise RecipeError(
                f"lora.{key.name} is {show(value)} and lora.path is {lora.path!r}, whose adapters have their own "
                f"settings; leave lora.{key.name} out."
            )
        raise RecipeError(f"lora.{key.name} is {show(value)} and lora.r is null, so there is no LoRA; set lora.r.")


def _check_data(data: DataSection) -> None:
    if data.kind in _PATHS and data.path is None:
        raise RecipeError(f"data.kind is {data.kind} and data.path is missing; give {_PATHS[data.kind]}.")
    if data.kind in _FILES and data.path is None:
        raise RecipeError(
            f"data.kind is {data.kind} and data.path is missing; give {_FILES[data.kind]} files, or a Hub data set's "
            "name."
        )
    if data.kind == "cldr" and not data.languages and data.num_languages is None:
        raise RecipeError(
            "data.kind is cldr and data.languages is empty; name some, such as [de, fr, es], or set data.num_languages."
        )
    if data.kind == "cldr" and data.languages and data.num_languages is not None:
        raise RecipeError(
            f"data.languages names {len(data.languages)} languages and data.num_languages is {data.num_languages}; "
            "leave one of the two out."
        )
    if data.kind == "cldr" and data.min_examples_per_language > data.examples_per_language:
        raise RecipeError(
            f"data.min_examples_per_language is {data.min_examples_per_language}, more than "
            f"data.examples_per_language, {data.examples_per_language}; lower the one or raise the other."
        )


def _check_rows(data: DataSection) -> None:
    if data.kind == "parallel" and data.target_path is None:
        raise RecipeError(
            "data.kind is parallel and data.target_path is missing; give the file with the translations of the lines "
            "of data.path."
        )
    if data.kind in _FILES and data.subset is not None and not isinstance(data.subset, str):
        raise RecipeError(
            f"data.subset is {show(data.subset)} and data.kind is {data.kind}, which reads one subset; give its name."
        )
    if isinstance(data.subset, dict):
        for language, name in data.subset.items():
            if not isinstance(name, str) or not name:
                raise RecipeError(f"data.subset.{language} is {show(name)}; give the name of a subset.")
    for language, number in (data.counts or {}).items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RecipeError(
                f"data.counts.{language} is {show(number)}; give the number of its pairs, a whole number of at least 1."
            )


def _check_streaming(recipe: Recipe) -> None:
    data = recipe.data
    if not data.streaming:
        for name in ("counts", "shuffle_buffer"):
            if getattr(data, name) != getattr(DataSection, name):
                raise RecipeError(
                    f"data.{name} is for data.streaming, which is false: without it all pairs are counted and "
                    "shuffled; leave it out, or set data.streaming."
                )
        return
    if recipe.training.max_steps is None:
        raise RecipeError(
            "data.streaming is true, and a stream has no end; set training.max_steps to the number of updates."
        )


def _check_preferences(recipe: Recipe) -> None:
    loss, training = recipe.preferences, recipe.training
    for name, value, users in unused_by_loss(loss):
        raise RecipeError(
            f"preferences.{name} is {value} and preferences.loss_type is {loss.loss_type}, which does not use it; "
            f"it is for {users}: leave it out."
        )
    for name in ("batch_tokens", "packing", "label_smoothing_factor", "logit_clipping"):
        if recipe.data.kind in (*PAIRED_KINDS, "kto", "embeddings", "prompts") and (value := getattr(training, name)):
            raise RecipeError(
                f"training.{name} is {show(value)} and data.kind is {recipe.data.kind}, whose mini-batches and loss "
                "are of several rows together; leave it out."
            )
    if recipe.data.kind == "kto" and training.length_bucketing:
        raise RecipeError(
            "training.length_bucketing is true and data.kind is kto, whose rows come in their order; set it to false."
        )
    if recipe.data.kind == "kto" and recipe.kto.loss_type == "kto" and training.batch_size < 2:
        raise RecipeError(
            "training.batch_size is 1 and kto.loss_type is kto, which reads answers of other rows of the mini-batch; "
            "use at least 2."
        )


def _check_grpo(recipe: Recipe) -> None:
    if recipe.grpo.beta and recipe.lora.r is None:
        raise RecipeError(
            f"grpo.beta is {recipe.grpo.beta} and lora.r is null: the reference is the model without its new adapters; "
            "set lora.r, or leave grpo.beta out."
        )


def _check_distillation(recipe: Recipe) -> None:
    given = recipe.distillation
    if given.teacher is None and given.top_k_file is None:
        for key in keys_of(DistillationSection).values():
            if (value := getattr(given, key.name)) != key.default:
                raise RecipeError(
                    f"distillation.{key.name} is {show(value)} and distillation.teacher is null; name a teacher, or "
                    f"leave distillation.{key.name} out."
                )
    elif recipe.training.packing:
        raise RecipeError(
            "training.packing is true and the section distillation is given, which needs rows; leave one out."
        )


def _check_classification(recipe: Recipe) -> None:
    data, training = recipe.data, recipe.training
    if data.kind not in LABELLED.names:
        return
    if len(set(data.labels)) < max(2, len(data.labels)):
        raise RecipeError(
            f"data.kind is {data.kind} and data.labels is {show(data.labels)}; name each class once, at least two, "
            "such as [negative, positive]."
        )
    if data.kind == "images" and recipe.lora.r is not None and not recipe.lora.modules_to_save:
        raise RecipeError(
            f"lora.r is {recipe.lora.r}, data.kind is images and lora.modules_to_save is empty, so the head would stay "
            "as it is; name it, such as [classifier]."
        )
    for name in ("batch_tokens", "packing"):
        if value := getattr(training, name):
            raise RecipeError(
                f"training.{name} is {show(value)} and data.kind is {data.kind}, whose rows have one label each "
                "and are padded; leave it out."
            )


def _check_image_text(recipe: Recipe) -> None:
    if recipe.data.kind != "image_text":
        return
    if recipe.model.path is None:
        raise RecipeError(
            "data.kind is image_text and model.path is null; give a model's path, whose processor prepares the rows."
        )
    for key, value in (
        ("training.packing", recipe.training.packing),
        ("training.batch_tokens", recipe.training.batch_tokens),
        ("pipeline.sequence_chunks", recipe.pipeline.sequence_chunks),
        ("tokenizer.path", recipe.tokenizer.path),
    ):
        if value not in (None, False, 1):
            raise RecipeError(
                f"{key} is {show(value)} and data.kind is image_text, whose rows have images; leave it out."
            )


def _check_devices(pipeline: PipelineConfig) -> None:
    processes = pipeline.num_processes or 1
    if pipeline.devices is not None and len(pipeline.devices) % processes:
        raise RecipeError(
            f"pipeline.devices {list(pipeline.devices)} cannot be shared out evenly between {processes} processes; "
            "give the same number of devices to each."
        )


def _check_precision(recipe: Recipe) -> None:
    training, dtype = recipe.training, recipe.model.dtype
    if training.bf16 and training.fp16:
        raise RecipeError("training.bf16 and training.fp16 are both true; set one of them to false.")
    if training.fp16 and recipe.pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        raise RecipeError(
            f"training.fp16 is true and pipeline.schedule is {recipe.pipeline.schedule}: the scale of the loss needs "
            "the gradients of all stages before an update; use training.bf16, or a synchronous schedule, such as 1f1b."
        )
    if training.fp16 and dtype != "float32":
        raise RecipeError(f"training.fp16 needs model.dtype float32, and it is {dtype}; set it, or use training.bf16.")
    if training.fp32_master_weights and dtype not in ("bfloat16", "float16"):
        raise RecipeError(
            f"training.fp32_master_weights is for weights in bfloat16 or float16, and model.dtype is {dtype}; set it "
            "to bfloat16, or leave the key out."
        )
