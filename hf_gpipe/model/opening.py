"""Makes the adapter of a model's spec, and checks the model before any weight is read."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_gpipe import strict_json
from hf_gpipe.adapters import Adapter, Autocast, adapter_for, is_known_exact
from hf_gpipe.adapters.auto_classes import (
    HEADLESS,
    IMAGE_CLASSIFICATION,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    text_part_named_by,
)
from hf_gpipe.adapters.chain import Chain, is_chain
from hf_gpipe.adapters.feed_forward import feed_forward_outputs
from hf_gpipe.adapters.guards import check_as_configured, check_classes, check_model, check_sizes, take_attributes
from hf_gpipe.adapters.modules.batch_norm import batch_norms_of
from hf_gpipe.adapters.modules.head import FoundProjection
from hf_gpipe.adapters.modules.patches import find_patches
from hf_gpipe.adapters.observation.observations import Shapes
from hf_gpipe.adapters.observation.skeleton import Blueprint, build_skeleton
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import num_tokens_of
from hf_gpipe.checkpoint.weight_files import dtype_of_weights
from hf_gpipe.errors import CheckpointError, UnsupportedModelError, UserError
from hf_gpipe.libraries.transformers import GENERATION_CONFIG_NAME, attention_implementation
from hf_gpipe.libraries.verified import unverified
from hf_gpipe.model.spec import ModelSource, ModelSpec
from hf_gpipe.model.verified_files import verify_files

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def chain_of(spec: ModelSpec) -> nn.Module | None:
    """The module whose layers form a chain: the given one, or an image classifier on the meta device.

    Raises UserError where an option is for models that read text. None: the model is another one.
    """
    model = spec.model
    if isinstance(model, nn.Module):
        module = model if is_chain(model) else None
        if isinstance(module, PreTrainedModel) and spec.has_peft_layers:  # which the stages get
            config = module.config
            module = build_skeleton(Blueprint(config, module.dtype, attention_implementation(config), type(module)))
    else:
        config = _config_of(spec)
        model_class = IMAGE_CLASSIFICATION.named_by(config)
        if model_class is None:
            return None
        module = build_skeleton(Blueprint(config, _dtype_of(spec, config), spec.attn_implementation, model_class))
    if module is not None:
        _check_chain(spec, module, is_in_memory=isinstance(model, nn.Module))
    return module


def open_chain(spec: ModelSpec, module: nn.Module, example: Shapes, device: torch.device | None = None) -> Chain:
    """The adapter of a chain of layers.

    Args:
        spec: of the model.
        module: of `chain_of`.
        example: the shapes of a mini-batch, by which the layers are followed.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: the module forms no chain.
    """
    chain = Chain(module, example, _autocast_of(spec, device))
    # The checkpoint of a model without a head, read as a classifier.
    chain.may_lack_head = "architectures" in (spec.config_overrides or {})
    if spec.peft_config is not None:
        if norms := [*batch_norms_of(module)]:
            raise UnsupportedModelError(
                f"peft_config: {norms[0]!r} of {type(module).__name__} is a BatchNorm, whose moving averages change in "
                "training and are not saved with adapters; train all weights, or a model without BatchNorm"
            )
        resolve_peft(chain, spec.peft_name, spec.peft_config, is_new=not spec.has_peft_layers)
    return chain


def open_model(spec: ModelSpec, device: torch.device, verify: Callable[[TextAdapter], None] | None = None) -> Adapter:
    """Read and check a model that reads text, without its weights.

    Args:
        spec: of the model.
        device: where this process computes.
        verify: raises UnsupportedModelError unless a tiny clone of the model in stages is exact; None: it is not run.

    Raises:
        UserError: the model cannot be split exactly, differs from its configuration, or does not fit the options.
    """
    model, adapter = spec.model, guarded_adapter(spec, device)
    layers = tuple(name for layer in adapter.layers for name in layer.all_modules)
    if verify is not None and not is_known_exact(adapter):
        verify(adapter)
    if unverified():
        verify_files(adapter)
    if (generation_config := _generation_config_of(model)) is not None:
        adapter.reference.generation_config = generation_config
    if isinstance(model, PreTrainedModel):
        expected = adapter.reference
        if adapter.peft is not None and spec.has_peft_layers:
            expected = adapter.skeleton()
            adapter.peft.inject(expected)
        check_as_configured(model, expected)
        take_attributes(adapter.reference, model)
        adapter.reference.model_tags = copy.copy(model.model_tags)
        adapter.patches = find_patches(model, expected, layers)
        if any(patch.layer == adapter.layers[-1].name for patch in adapter.patches):
            adapter.projection = FoundProjection((), "a function of its head was replaced")
    return adapter


def guarded_adapter(spec: ModelSpec, device: torch.device | None = None) -> TextAdapter:
    """The adapter of a model that reads text, checked in every way but by a tiny clone.

    Args:
        spec: of the model.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: the model or an option is not supported.
    """
    model = spec.model
    if is_chain(model):
        raise UserError(f"{type(model).__name__} is no Hugging Face model that reads text; give a model that does")
    check_model(model)
    _check_options(spec)
    adapter = adapter_of(spec, device)
    check_classes(adapter.reference, tuple(name for layer in adapter.layers for name in layer.all_modules))
    return adapter


def adapter_of(spec: ModelSpec, device: torch.device | None = None) -> TextAdapter:
    """The adapter of a model by its configuration alone, with nothing checked that needs more.

    Args:
        spec: of the model.
        device: where autocast is observed; None: without autocast.

    Raises:
        UserError: transformers cannot read the configuration, or the family or an option is not supported.
    """
    model = spec.model
    model_class, attn_implementation = None, spec.attn_implementation
    if isinstance(model, PreTrainedModel):
        if read_dtype(spec.dtype, "dtype") not in (None, model.dtype):
            raise UserError(f"dtype={spec.dtype}: the given model is {model.dtype}; convert it before, with model.to")
        config, weights, model_class = model.config, model.dtype, type(model)
        attn_implementation = attn_implementation or attention_implementation(config)
    else:
        config = _config_of(spec)
        weights = _dtype_of(spec, config)
    names_class = isinstance(model, PreTrainedConfig) or "architectures" in (spec.config_overrides or {})
    if model_class is None:
        # A path alone stands for a language model: some of their checkpoints name the class without a head.
        model_class = SEQUENCE_CLASSIFICATION.named_by(config) or TOKEN_CLASSIFICATION.named_by(config)
        model_class = model_class or (HEADLESS.named_by(config) if names_class else None) or text_part_named_by(config)
    make = partial(
        adapter_for,
        dtype=weights,
        attn_implementation=attn_implementation,
        model_class=model_class,
        trust_remote_code=spec.trust_remote_code,
        autocast=_autocast_of(spec, device),
        quantization_config=spec.quantization_config,
    )
    adapter = make(config)
    if spec.saved_adapters is not None:
        size = adapter.reference.config.get_text_config().vocab_size
        num_tokens = num_tokens_of(Path(spec.saved_adapters), adapter.reference)
        if num_tokens not in (None, size):
            # peft saves the embedding and the head with the adapters where the vocabulary was extended.
            config = copy.deepcopy(config)
            config.get_text_config().vocab_size = num_tokens
            adapter = make(config)
            ends = (adapter.reference.get_input_embeddings(), adapter.reference.get_output_embeddings())
            modules = adapter.reference.named_modules(remove_duplicate=False)
            adapter.extended = frozenset(f"{name}.weight" for name, module in modules if module in ends)
    # A language model's checkpoint, read as a classifier, or without its head and with a pooler that nothing reads.
    has_classes = adapter.labels_rows or adapter.task_type is not None
    is_unlike = has_classes and "architectures" in (spec.config_overrides or {})
    adapter.may_lack_head = is_unlike and adapter.ends_with_head
    if spec.depth_scaled_feed_forward:
        adapter.divided_by_depth = feed_forward_outputs(adapter)
    if spec.peft_config is not None:
        resolve_peft(adapter, spec.peft_name, spec.peft_config, is_new=not spec.has_peft_layers)
    return adapter


def _autocast_of(spec: ModelSpec, device: torch.device | None) -> Autocast | None:
    return None if spec.autocast is None or device is None else Autocast(spec.autocast, device)


def _config_of(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration of a model that is not in memory."""
    if isinstance(spec.model, PreTrainedConfig):
        return spec.model
    assert isinstance(spec.model, str | os.PathLike)
    return read_config(spec.model, trust_remote_code=spec.trust_remote_code, overrides=spec.config_overrides)


def _dtype_of(spec: ModelSpec, config: PreTrainedConfig) -> torch.dtype:
    given = read_dtype(spec.dtype, "dtype")
    own = given or read_dtype(getattr(config, "dtype", None), "the configuration's dtype")
    if own is None and isinstance(spec.model, str | os.PathLike):
        own = read_dtype(dtype_of_weights(spec.model), "the type of the weights")
    return own or torch.float32


def read_dtype(given: Any, what: str) -> torch.dtype | None:
    """The type of the weights, given as a type or its name; None for the model's own. Raises UserError for others."""
    if given is None or given == "auto":
        return None
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if dtype not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise UserError(f"{what} is {given!r}; expected one of {names}, or 'auto' for the model's own")
    return dtype


def _check_options(spec: ModelSpec) -> None:
    """Raise UserError where options do not go with the form of the model, or with each other."""
    model = spec.model
    if spec.config_overrides and not isinstance(model, str | os.PathLike):
        raise UserError("config_overrides go with a Hub id or directory; change the configuration that you give")
    if spec.depth_scaled_feed_forward and not isinstance(model, PreTrainedConfig):
        raise UserError(
            "depth_scaled_feed_forward is for a new model, and this one has its weights; leave it out, or give a "
            "configuration"
        )
    if spec.depth_scaled_feed_forward and spec.quantization_config is not None:
        raise UserError("depth_scaled_feed_forward and quantization_config exclude each other; leave one of them out")
    if isinstance(model, PreTrainedModel) and spec.quantization_config is not None:
        raise UserError(
            "quantization_config is for weights that are read; give the model's Hub id or directory, or load the "
            "model with quantization_config in from_pretrained"
        )


def _check_chain(spec: ModelSpec, model: nn.Module, *, is_in_memory: bool) -> None:
    """Raise UserError where an option is for models that read text, or for those that are not in memory yet."""
    names: tuple[str, ...] = ("quantization_config", "depth_scaled_feed_forward")
    if not isinstance(model, PreTrainedModel):
        names = (*names, "peft_config")
    others = {name: getattr(spec, name) for name in names}
    if is_in_memory:
        others |= {name: getattr(spec, name) for name in ("attn_implementation", "config_overrides")}
        others["dtype"] = read_dtype(spec.dtype, "dtype")
    if asked := [name for name, value in others.items() if value]:
        raise UserError(
            f"{asked[0]} is for {'models that read text' if asked[0] in names else 'a model that is read'}, and the "
            f"model is a {type(model).__name__}, which is taken as it is; leave it out"
        )


def _generation_config_of(model: ModelSource) -> GenerationConfig | None:
    """The generation configuration that comes with the model; None: transformers derives it."""
    if isinstance(model, PreTrainedModel):
        return copy.deepcopy(getattr(model, "generation_config", None))
    if isinstance(model, PreTrainedConfig):
        return None
    assert isinstance(model, str | os.PathLike)
    file = Path(model) / GENERATION_CONFIG_NAME
    if file.exists():
        check_sizes(strict_json.read(file, dict[str, Any], allows_nan=True), f"{file}: ")
    try:
        return GenerationConfig.from_pretrained(str(model))
    except OSError:
        return None
    except Exception as error:  # the library raises whatever its reading comes upon
        raise CheckpointError(f"cannot read {file}: {error}") from error
