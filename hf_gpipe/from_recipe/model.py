"""Makes the model of a recipe: its configuration, its `ModelSpec`, and the model beside it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_gpipe.adapters.auto_classes import IMAGE_CLASSIFICATION
from hf_gpipe.adapters.classifiers import ONE_CLASS, as_classifier, change
from hf_gpipe.adapters.embedders import as_embedder
from hf_gpipe.adapters.guards import check_sizes
from hf_gpipe.adapters.modules.quantised import need_bitsandbytes
from hf_gpipe.adapters.peft import need_peft
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import has_adapters
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import CheckpointError, RecipeError, UnsupportedModelError, nearest
from hf_gpipe.model.companion import Companion
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.recipe import Recipe
from hf_gpipe.recipe.transformer import with_transformer
from hf_gpipe.registry import task_of_kind

#: Families whose decoder starts with the padding token; the others' start with the end-of-sequence token.
_STARTS_WITH_PADDING = ("marian", "pegasus", "t5", "mt5", "umt5")
#: Fields of a configuration that name a token.
_TOKENS = ("pad_token_id", "eos_token_id", "bos_token_id", "forced_eos_token_id", "decoder_start_token_id")
#: The fields among these that a recipe may set: the token that a decoder starts with, and a forced last token.
_FREE_TOKENS = ("forced_eos_token_id", "decoder_start_token_id")


#: peft's names of what is no generation, by the heads of tasks.
_TASK_TYPES = {"classes": "SEQ_CLS", "score": "SEQ_CLS", "none": "FEATURE_EXTRACTION", "images": None}


def _head_of(recipe: Recipe) -> str:
    """The head of the model that the recipe's task learns, as `Task.head` names it."""
    head: str = task_of_kind(recipe.data.kind).head
    return head


def _autocast_of(recipe: Recipe) -> torch.dtype | None:
    """The half precision that forwards compute in, if any."""
    name = recipe.training.half_precision
    return None if name is None else getattr(torch, name)


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    """The model's configuration, which has the tokenizer's ids wherever the recipe gives none, and its classes.

    Args:
        recipe: its model section.
        tokenizer: None: the recipe alone is looked at, before there is a tokenizer.

    Raises:
        UserError: an unknown family or field, a value that does not fit, or one that contradicts the tokenizer.
    """
    config = _config_of_language_model(recipe, tokenizer)
    if _head_of(recipe) == "none" or not config.is_encoder_decoder:
        change(config, _fields_of_kind(recipe, config, tokenizer))
    return config


def _fields_of_kind(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """The fields by which a language model's configuration becomes that of the model which the kind of data needs.

    Raises UnsupportedModelError where the family has no such model.
    """
    kind, head = recipe.data.kind, _head_of(recipe)
    if head == "none":
        return dict(as_embedder(config))
    if head == "lm":
        return {}
    labels, problem = (["LABEL_0"], None) if head == "score" else (recipe.data.labels, ONE_CLASS)
    try:
        if head == "images":
            return IMAGE_CLASSIFICATION.fields(config, labels) | {"problem_type": problem}
        padding = 0 if tokenizer is None else PairCollator.for_tokenizer(tokenizer).pad_token_id
        return as_classifier(config, labels, padding, problem)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"data.kind is {kind}, and {error}") from error


def _config_overrides_of(recipe: Recipe, config: PreTrainedConfig) -> dict[str, Any] | None:
    """The values in which the model at `model.path` shall differ from its configuration; `config`: `model_config`'s."""
    if recipe.model.path is None:
        return None
    given, fields = recipe.model.config, _fields_of_kind(recipe, config)
    inner = {name: given[name] | fields[name] for name in config.sub_configs if name in given and name in fields}
    return given | fields | inner


def _config_of_language_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    model = recipe.model
    if has_adapters(model.path):
        raise RecipeError(
            f"model.path {model.path!r} has PEFT adapters and no model; give the model that they belong to, and the "
            "adapters as lora.path"
        )
    if model.path is not None:
        values = {name: value for name, value in model.config.items() if name != "model_type"}
        try:
            config = read_config(model.path, trust_remote_code=model.trust_remote_code, overrides=values)
        except CheckpointError as error:
            raise RecipeError(f"model.path: {error}") from error
        if model.config.get("model_type", config.model_type) != config.model_type:
            raise RecipeError(
                f"model.config.model_type is {model.config['model_type']} and the model at {model.path!r} is a "
                f"{config.model_type}; leave model.config.model_type out, or give the path of another model"
            )
        if tokenizer is not None and len(tokenizer) > (size := config.get_text_config().vocab_size):
            raise RecipeError(
                f"the tokenizer has {len(tokenizer)} tokens and the model at {model.path!r} only {size}; "
                "set tokenizer.path to the model's own tokenizer"
            )
        return config
    fields = model.config if model.transformer is None else with_transformer(model.config, model.transformer)
    family, given = fields["model_type"], {k: v for k, v in fields.items() if k != "model_type"}
    check_sizes(given, "model.config.")
    if family not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model.config.model_type: transformers has no model family {family!r}{nearest(family, CONFIG_MAPPING)}"
        )
    defaults = CONFIG_MAPPING[family]()
    known = {*defaults.to_dict(), *defaults.attribute_map}
    for name in given:
        if name not in known:
            raise RecipeError(f"model.config.{name} is not a field of a {family} configuration{nearest(name, known)}")
    if _head_of(recipe) == "images":
        pass
    elif tokenizer is None:
        # Any token does that is in the vocabulary, as the family's own defaults may not be.
        given = dict.fromkeys(set(_TOKENS) & known, 0) | given
    else:
        given = _with_tokenizer(given, tokenizer, defaults)
    try:
        return AutoConfig.for_model(family, **given)
    except Exception as error:  # the library's checks of a field's type raise a class that is only an Exception
        raise RecipeError(f"model.config: {error}") from error


def _with_tokenizer(
    given: dict[str, Any], tokenizer: PreTrainedTokenizerBase, defaults: PreTrainedConfig
) -> dict[str, Any]:
    """A configuration's values completed by the tokenizer's."""
    starts_with_padding = defaults.model_type in _STARTS_WITH_PADDING
    start = tokenizer.pad_token_id if starts_with_padding else tokenizer.eos_token_id
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, start)
    # Some families do not declare the decoder's start token, but all of them read it.
    fields = {*defaults.to_dict(), *(["decoder_start_token_id"] if defaults.is_encoder_decoder else [])}
    values = dict(given)
    for name, token in zip(_TOKENS, tokens, strict=True):
        if token is None or name not in fields:
            continue
        if values.setdefault(name, token) != token and name not in _FREE_TOKENS:
            raise RecipeError(
                f"model.config.{name} is {given[name]} and the tokenizer's is {token}; leave it out, it is taken from "
                "the tokenizer"
            )
    if values.setdefault("vocab_size", len(tokenizer)) < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {values['vocab_size']} and the tokenizer has {len(tokenizer)} tokens; leave "
            "it out, it is taken from the tokenizer"
        )
    return values


def model_dtype(recipe: Recipe) -> torch.dtype:
    """The type of the weights."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def spec_of(recipe: Recipe, config: PreTrainedConfig) -> ModelSpec:
    """The recipe's model; `config` is of `model_config`. Raises UserError where a package for it is missing."""
    model = recipe.model
    return ModelSpec.of(
        model.path or config,
        dtype=model_dtype(recipe),
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        config_overrides=_config_overrides_of(recipe, config),
        depth_scaled_feed_forward=model.depth_scaled_feed_forward,
        autocast=_autocast_of(recipe),
        quantization_config=_quantization_config_of(recipe, recipe.model.quantization),
        peft_config=_peft_config_of(recipe, config),
    )


def companion_of(recipe: Recipe) -> Companion | None:
    """The model beside the trained one that the recipe names; None: it names none. Raises UserError where a package for
    it is missing."""
    if recipe.companion is None:
        return None
    model, (_, section) = recipe.model, recipe.companion
    spec = ModelSpec.of(
        section.companion,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        autocast=_autocast_of(recipe),
        quantization_config=_quantization_config_of(recipe, section.quantization),
    )
    return Companion(section.mode, spec)


def _quantization_config_of(recipe: Recipe, kind: str | None) -> BitsAndBytesConfig | None:
    """How weights are quantised while they are loaded, if they are. Raises UserError without bitsandbytes."""
    if kind is None:
        return None
    need_bitsandbytes()
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=recipe.model.double_quantization,
        bnb_4bit_compute_dtype=_autocast_of(recipe) or model_dtype(recipe),
    )


def _peft_config_of(recipe: Recipe, config: PreTrainedConfig) -> Any:
    """The `peft_config` of a recipe's `Pipeline` for a model of this configuration. Raises UserError without peft."""
    lora = recipe.lora
    if not lora.is_on:
        return None
    need_peft()
    if lora.r is None:
        assert lora.path is not None
        if not has_adapters(lora.path):
            raise RecipeError(
                f"lora.path: there is no adapter_config.json in {lora.path!r}; give a directory of adapters"
            )
        return lora.path
    from peft import LoraConfig

    task_type = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.target_modules or "all-linear",
        modules_to_save=lora.modules_to_save or None,
        task_type=_TASK_TYPES.get(_head_of(recipe), task_type),
    )
