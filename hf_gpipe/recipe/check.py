"""What must hold between the fields of a recipe."""

from __future__ import annotations

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe.fields import DataSection, ModelSection, PipelineSection, Recipe
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.recipe.transformer import with_transformer


def check(recipe: Recipe) -> None:
    """Raises RecipeError for fields that contradict each other; names the keys and both values."""
    _check_model(recipe.model)
    _check_data(recipe.data)
    _check_pipeline(recipe.pipeline)
    _check_precision(recipe)


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
            f"model.transformer is {model.transformer!r} and model.path is {model.path!r}, whose model has its size; "
            "leave one of them out."
        )
    if model.path is not None and model.depth_scaled_feed_forward:
        raise RecipeError(
            f"model.depth_scaled_feed_forward is for a new model, and model.path is {model.path!r}, whose weights are "
            "loaded; leave one of them out."
        )
    if model.transformer is not None:
        with_transformer(model.config, model.transformer)


def _check_data(data: DataSection) -> None:
    if data.kind == "jsonl" and data.path is None:
        raise RecipeError("data.kind is jsonl and data.path is missing; give the file, one JSON object a line.")
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
    if data.validation_fraction + data.test_fraction >= 1:
        raise RecipeError(
            f"data.validation_fraction {data.validation_fraction} and data.test_fraction {data.test_fraction} leave "
            "nothing to train on; their sum must be below 1."
        )


def _check_pipeline(pipeline: PipelineSection) -> None:
    if pipeline.num_processes is not None and pipeline.num_processes > pipeline.num_stages:
        raise RecipeError(
            f"pipeline.num_processes is {pipeline.num_processes} and pipeline.num_stages is {pipeline.num_stages}; "
            "a process without a stage has nothing to do: use at most as many processes as stages."
        )
    if not isinstance(pipeline.partition, str) and len(pipeline.partition) != pipeline.num_stages:
        raise RecipeError(
            f"pipeline.partition {pipeline.partition} has {len(pipeline.partition)} entries and pipeline.num_stages is "
            f"{pipeline.num_stages}; give one number of layers a stage."
        )
    if pipeline.devices is not None and (not pipeline.devices or len(pipeline.devices) % (pipeline.num_processes or 1)):
        raise RecipeError(
            f"pipeline.devices {pipeline.devices} cannot be shared out evenly between {pipeline.num_processes or 1} "
            "processes; name as many devices for each."
        )
    if pipeline.torch_compile_backend is not None and not pipeline.torch_compile:
        raise RecipeError(
            f"pipeline.torch_compile_backend is {pipeline.torch_compile_backend!r} and pipeline.torch_compile is "
            "false; set torch_compile to true, or leave the backend out."
        )
    if pipeline.memory is not None:
        try:
            read_bytes(pipeline.memory, "pipeline.memory")
        except UserError as error:
            raise RecipeError(str(error)) from None


def _check_precision(recipe: Recipe) -> None:
    training, dtype = recipe.training, recipe.model.dtype
    if training.bf16 and training.fp16:
        raise RecipeError("training.bf16 and training.fp16 are both true; a forward computes in one of them.")
    if training.fp16 and dtype != "float32":
        raise RecipeError(f"training.fp16 needs model.dtype float32, and it is {dtype}; set it, or use training.bf16.")
    if training.fp32_master_weights and dtype not in ("bfloat16", "float16"):
        raise RecipeError(
            f"training.fp32_master_weights is for weights in bfloat16 or float16, and model.dtype is {dtype}; set it "
            "to bfloat16, or leave the key out."
        )
