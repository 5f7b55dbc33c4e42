"""What must hold between the fields of a recipe."""

from __future__ import annotations

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe.fields import DataSection, ModelSection, PipelineSection, Recipe
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.recipe.transformer import with_transformer
from hf_gpipe.recipe.typed import show

#: Kinds of data that are read from somewhere, and what their path is.
_PATHS = {
    "jsonl": "the file, one JSON object a line",
    "csv": "the file, whose first line names the columns",
    "parquet": "the file",
    "parallel": "the file with a source on each line",
    "hub": "the id of a data set of the Hub, or a directory of that form",
}
_STREAMED = tuple(_PATHS)


def check(recipe: Recipe) -> None:
    """Raises RecipeError for fields that contradict each other; names the keys and both values."""
    _check_model(recipe.model)
    _check_data(recipe.data)
    _check_rows(recipe.data)
    _check_streaming(recipe)
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
    if data.kind in _PATHS and data.path is None:
        raise RecipeError(f"data.kind is {data.kind} and data.path is missing; give {_PATHS[data.kind]}.")
    if data.kind == "text" and data.path is None:
        raise RecipeError(
            "data.kind is text and data.path is missing; give .txt, .jsonl or .parquet files, or a Hub data set's name."
        )
    if data.kind == "text" and data.temperature != 1:
        raise RecipeError(
            f"data.temperature is {data.temperature:g} and data.kind is text, which has no languages to draw "
            "from; leave it out."
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
    if data.validation_fraction + data.test_fraction >= 1:
        raise RecipeError(
            f"data.validation_fraction {data.validation_fraction} and data.test_fraction {data.test_fraction} leave "
            "nothing to train on; their sum must be below 1."
        )


def _check_rows(data: DataSection) -> None:
    if data.kind == "parallel" and data.target_path is None:
        raise RecipeError(
            "data.kind is parallel and data.target_path is missing; give the file with the translations of the lines "
            "of data.path."
        )
    if data.kind == "text" and data.subset is not None and not isinstance(data.subset, str):
        raise RecipeError(f"data.subset is {show(data.subset)} and data.kind is text, which reads one; name it.")
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
        if data.counts is not None:
            raise RecipeError(
                "data.counts is for data.streaming, which is false: pairs that are read as a whole are counted; leave "
                "it out, or set data.streaming."
            )
        return
    if data.kind not in _STREAMED:
        raise RecipeError(f"data.streaming is true and data.kind is {data.kind}; only {', '.join(_STREAMED)} have it.")
    if recipe.training.max_steps is None:
        raise RecipeError(
            "data.streaming is true, and a stream has no end; say by training.max_steps how long to train."
        )
    if data.max_examples is not None:
        raise RecipeError(
            f"data.max_examples is {data.max_examples} and data.streaming is true, which has no end to draw from; "
            "leave one of them out."
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
