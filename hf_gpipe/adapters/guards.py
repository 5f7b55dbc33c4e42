"""Checks of configurations and models: raise an error for what stages cannot compute exactly."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.auto_classes import HEADLESS, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from hf_gpipe.errors import UnsupportedModelError, UserError, nearest
from hf_gpipe.libraries.torch import accumulation_hooks, gradient_hooks, hooks_of
from hf_gpipe.libraries.transformers import (
    ALL_ATTENTION_FUNCTIONS,
    INITIALISERS,
    LOSS_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    attention_implementation,
)
from hf_gpipe.text import shorten, show

#: The largest number in a configuration whose name matches; the last one is for all names. A model of 5000 layers is
#: made in seconds, and the deepest that are known have 2500.
_LARGEST = (
    (re.compile(r"(layer|layers|blocks|depth)$"), 5000),
    (re.compile(r"(experts|expert_num)$"), 20_000),
    (re.compile(r"num_labels$"), 1_000_000),
    (re.compile(""), 2**40),
)
#: The smallest number in a configuration whose name matches: for -1 layers transformers makes a model without blocks.
#: Vip-Llava's vision_feature_layers are places, and -1 is the last.
_SMALLEST = (
    (re.compile(r"(hidden_size|d_model|n_embd|n_head|heads|per_tok(en)?|max_position_embeddings|n_positions)$"), 1),
    (re.compile(r"(^n_layer|(?<!feature_)layers|blocks|depth|experts|intermediate_size|_dim)$"), 0),
    (re.compile(""), -(2**40)),
)
#: Names of probabilities. Of another number some kernels raise an error in the first step, and others never do.
_PROBABILITY = re.compile(r"(dropout|pdrop|layerdrop|dropout_(p|prob|rate)|drop(_path)?_rate)$")


def check_sizes(fields: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for a number in a configuration's fields that no model has, before anything is made of it.

    The token of the end, and the like, must be whole numbers: generation, after the training, would see it first.

    Args:
        fields: the fields, as in config.json.
        prefix: what the fields' names begin with in messages.
    """
    for name, value in fields.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not str(name).endswith("_token_id"):
            check_sizes(value, f"{key}.")
            continue
        if str(name).endswith("_token_id") and value in ([], ()):
            raise UserError(f"{key} is an empty list, expected a whole number or several; correct it")
        if name == "decoder_start_token_id" and isinstance(value, list | tuple) and len(value) > 1:
            raise UserError(f"{key} has {len(value)} tokens, expected one; correct it")
        for number in value if isinstance(value, list | tuple) else (value,):
            if str(name).endswith("_token_id") and number is not None and type(number) is not int:
                raise UserError(f"{key} is {show(number)}, expected a whole number; correct it")
            if _PROBABILITY.search(str(name)) and isinstance(number, int | float) and not 0 <= number <= 1:
                raise UserError(f"{key} is {show(number)}, expected a number of at least 0 and at most 1; correct it")
            if isinstance(number, float) and math.isnan(number):
                raise UserError(f"{key} is {show(number)}, expected a number; correct it")
            least, most = (
                next(limit for pattern, limit in limits if pattern.search(str(name)))
                for limits in (_SMALLEST, _LARGEST)
            )
            if type(number) is int and not least <= number <= most:
                limit = f"at least {least}" if number < least else f"at most {most}"
                raise UserError(f"{key} is {shorten(str(number))}, and {limit} is allowed; correct it")


def check_attention(config: PreTrainedConfig, asked: str | None = None) -> None:
    """Raise UserError unless each attention that is asked for is a function that is installed.

    The name of a kernel on the Hub, "owner/name", would let transformers fetch its code and run it.

    Args:
        config: the configuration; its attention is checked, and the attention of the configurations inside of it.
        asked: the argument attn_implementation.
    """
    if asked is not None:
        names: list[Any] = [asked]
    else:
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        names = [attention_implementation(part) for part in parts]
    allowed = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    for name in names:
        if name is not None and name not in allowed:
            is_kernel = "/" in str(name)
            hint = "; a kernel of the Hub is code, and is not fetched" if is_kernel else nearest(str(name), allowed)
            raise UserError(f"attn_implementation is {name!r}, expected one of {', '.join(allowed)}{hint}")


def check_config(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError where a configuration asks for something that stages cannot compute exactly."""
    family, text = config.model_type, config.get_text_config(decoder=True)
    for rate in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, rate, 0.0):
            raise UnsupportedModelError(
                f"{family}: {rate} is {getattr(config, rate)}, and a layer left out at random cannot be the same on "
                f"every split; set {rate} to 0.0 in the model's configuration"
            )
    for flag in ("output_hidden_states", "output_attentions"):
        if getattr(config, flag, False) or getattr(text, flag, False):
            raise UnsupportedModelError(
                f"{family}: {flag} is set, and a pipeline returns the loss and logits only; set {flag} to false in the "
                "model's configuration"
            )
    if config.is_encoder_decoder and getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{family}: output_router_logits is set; the routers' losses of an encoder-decoder are not supported, and "
            "transformers adds them only where forward is asked to; set it to false in the model's configuration"
        )
    for name, what in (
        ("num_kv_shared_layers", "blocks that use the keys and values of earlier blocks"),
        ("hidden_size_per_layer_input", "an embedding that every block reads"),
        ("use_prompt", "prompts that every block reads"),
    ):
        if value := getattr(text, name, 0):
            how = "set" if value is True else "above 0"
            raise UnsupportedModelError(f"{family}: {name} is {how}, and {what} cannot be on another stage")


def check_as_configured(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Raise UserError where a model in memory differs from a model built from its configuration.

    Stages are built from the configuration, so a change of the modules alone would be lost silently.

    Args:
        model: the model in memory.
        expected: the same model built from its configuration, on any device.
    """
    family = model.config.model_type
    # After resize_token_embeddings an encoder-decoder has one embedding under several names, for several tied ones.
    modules, wanted = (dict(one.named_modules(remove_duplicate=False)) for one in (model, expected))
    for name in modules.keys() ^ wanted.keys():
        where = "not made by its configuration" if name in modules else "in its configuration alone"
        raise UserError(f"{family}: the model's module {name!r} is {where}, from which the stages are built")
    for name, module in modules.items():
        what = f"{family}: the module {name or 'at the root'!r}"
        if type(module).__qualname__ != type(wanted[name]).__qualname__:
            kinds = type(module).__qualname__, type(wanted[name]).__qualname__
            raise UserError(f"{what} is a {kinds[0]} where the configuration makes a {kinds[1]}")
        for kind, hooks in _hooks(module):
            raise UserError(f"{what} has {kind} hooks ({hooks[0]}), which stages would not run; remove them")
        for attribute, value in _plain_attributes(wanted[name]).items():
            own = vars(module).get(attribute)
            # Some recurrent blocks keep a state there in a forward, and quantised layers the scales of their weights.
            is_state = isinstance(own, torch.Tensor) and value is None
            is_state |= type(own).__module__.startswith("bitsandbytes.")
            is_taken = _is_plain(own) and _is_taken(name, attribute)
            # Of a tied head, resize_token_embeddings exchanges the weight alone.
            is_taken |= attribute == "out_features" and len(getattr(module, "weight", ())) == value
            if not is_state and not is_taken and (isinstance(own, torch.Tensor) or own != value):
                raise UserError(
                    f"{what} has {attribute}={own!r} and stages made by its configuration have {value!r}; set it to "
                    "that, or change the configuration and make the model from it"
                )
    if model.loss_type != expected.loss_type:
        raise UserError(
            f"{family}: the model's loss_type is {model.loss_type!r} and stages made by its configuration have "
            f"{expected.loss_type!r}; set it to that, and give a loss as LogitsLoss(function) or compute_loss_func"
        )
    names = {n for n, _ in expected.named_parameters(remove_duplicate=False)}
    if extra := {n for n, _ in model.named_parameters(remove_duplicate=False)} ^ names:
        raise UserError(f"{family}: the parameter {sorted(extra)[0]!r} and the model's configuration do not agree")
    if odd := _aliases(model) ^ _aliases(expected):
        raise UserError(
            f"{family}: the model and its configuration do not tie the same weights: {', '.join(sorted(odd.pop()))}; "
            "set tie_word_embeddings in the configuration to what the model does"
        )


def take_attributes(model: nn.Module, source: nn.Module) -> None:
    """Give a model those plain attributes of a model in memory that need not be as its configuration makes them.

    Args:
        model: the whole model on the meta device, or that of a stage.
        source: the model in memory.
    """
    modules = dict(source.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        own = _plain_attributes(modules[name]) if name in modules else {}
        for attribute in _plain_attributes(module).keys() & own.keys():
            if _is_taken(name, attribute):
                setattr(module, attribute, copy.deepcopy(own[attribute]))


def _is_taken(module: str, attribute: str) -> bool:
    """Whether an attribute is taken as it is: the root's, which its forward reads, and the padding of any module.

    Scripts set `config.pad_token_id` after loading, and the embedding keeps the padding that it was made with.
    """
    return not module or attribute in ("padding_idx", "pad_token_id")


def take_hooks(parameter: nn.Parameter, source: nn.Parameter) -> None:
    """Register the gradient hooks of a parameter on a copy of it, such as one on another device."""
    if parameter is source or not parameter.requires_grad:
        return
    for hook in (gradient_hooks(source) or {}).values():
        parameter.register_hook(hook)
    for hook in (accumulation_hooks(source) or {}).values():
        parameter.register_post_accumulate_grad_hook(hook)


def check_hooks(name: str, parameter: torch.Tensor, part: str) -> None:
    """Raise UserError where a parameter of this name has gradient hooks, which would see the gradient of a part."""
    for hooks in (gradient_hooks(parameter), accumulation_hooks(parameter)):
        for hook in (hooks or {}).values():
            raise UserError(
                f"the parameter {name!r} has a gradient hook ({getattr(hook, '__qualname__', repr(hook))}), which "
                f"would see the gradient of {part}; remove it"
            )


def check_classes(model: PreTrainedModel, layers: tuple[str, ...]) -> None:
    """Raise UserError where a class was changed or extended in a way that stages would not run.

    Modules inside of the layers are run by stages as their classes are. What is between the layers, and the loss, is
    transformers' own.

    Args:
        model: the whole model, on any device.
        layers: the names of the modules of the layer list.
    """
    family, root = model.config.model_type, type(model)
    for name, module in model.named_modules():
        if any(name == layer or name.startswith(f"{layer}.") for layer in layers):
            continue
        forward: Any = type(module).forward
        where = getattr(forward, "__globals__", {}).get("__name__", "")
        if _is_library_s(type(module)) and not _is_library_s(forward, where):
            raise UserError(
                f"{family}: {type(module).__name__}.forward was replaced by {forward.__qualname__} of {where}, and "
                "stages would not run it as the whole model does; undo that (a pipeline computes the logits' loss in "
                "slices by itself), or replace the forward of modules inside of a layer"
            )
    is_derived = any(c.__module__.startswith("transformers.models.") for c in root.__mro__)
    for number, cls in enumerate(root.__mro__):
        if not is_derived or _is_library_s(cls):
            break
        bases = root.__mro__[number + 1 :]
        for name, value in vars(cls).items():
            is_code = isinstance(value, FunctionType | property | classmethod | staticmethod)
            if is_code and name not in _OWN_METHODS and any(name in vars(base) for base in bases):
                raise UserError(
                    f"{family}: {cls.__name__} overrides {name}, which stages would not run as the whole model does; "
                    f"use {bases[0].__name__}, and give a loss as LogitsLoss(function) or compute_loss_func"
                )
    if (loss_type := getattr(model, "loss_type", None)) in LOSS_MAPPING and not _is_library_s(LOSS_MAPPING[loss_type]):
        raise UserError(
            f"{family}: transformers' loss {loss_type!r} was replaced by {LOSS_MAPPING[loss_type].__qualname__}, and a "
            "pipeline computes transformers' own; give the loss as LogitsLoss(function) or compute_loss_func"
        )


#: Methods of a subclass of a model that a stage, which is built from the same class, runs as they are.
_OWN_METHODS = ("__init__", "__repr__", *INITIALISERS, "get_input_embeddings", "get_output_embeddings")
_LIBRARIES = ("transformers", "transformers_modules", "torch", "peft", "bitsandbytes", "kernels", "hf_gpipe")


def _is_library_s(thing: Any, module: str | None = None) -> bool:
    """Whether a class or a function comes from a library, or is code of the model's own repository."""
    return (module or getattr(thing, "__module__", None) or "").partition(".")[0] in _LIBRARIES


def _hooks(module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The kinds of hooks that a user has put on a module, and their names."""
    for kind, every in hooks_of(module).items():
        # transformers leaves hooks of its own once it has recorded outputs; they do nothing in a pipeline.
        hooks = [hook for hook in every if not getattr(hook, "__module__", "").startswith("transformers.")]
        if hooks:
            yield kind, [getattr(hook, "__qualname__", repr(hook)) for hook in hooks]


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes that a module's constructor has set; none that a forward or a resize changes."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in ("training", "gradient_checkpointing", "vocab_size", "support_avx512bf16_for_cpu")
        and name != "all_tied_weights_keys"  # of a stage with adapters they are others; `_aliases` are compared
        and "cached" not in name
        and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a flag, or has nothing else in it."""
    if isinstance(value, list | tuple | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


_PLAIN = (bool, int, float, str, type(None))


def _aliases(model: PreTrainedModel) -> set[frozenset[str]]:
    """The sets of names that belong to the same parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def check_model(model: Any) -> None:
    """Raise UserError where a model in memory is not a plain transformers language model on one device."""
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}, not a transformers model; give the model itself, before anything "
            "is wrapped around it (the .module of DistributedDataParallel)"
        )
    if not isinstance(model, PreTrainedModel):
        return
    heads = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}
    ours = [c for c in type(model).__mro__ if c.__module__.startswith("transformers.models.")]
    heads |= SEQUENCE_CLASSIFICATION.names | TOKEN_CLASSIFICATION.names | HEADLESS.names
    heads |= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    if ours and not any(c.__name__ in heads for c in ours):
        raise UnsupportedModelError(
            f"{model.config.model_type}: {type(model).__name__} is no class of AutoModelForCausalLM, "
            "AutoModelForSeq2SeqLM, AutoModelForImageTextToText, AutoModelForSequenceClassification, "
            "AutoModelForTokenClassification or, without a head, AutoModel; give a model of one of those"
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UserError(
            "the model is spread over devices by its device_map; load it without device_map, or give its directory"
        )
