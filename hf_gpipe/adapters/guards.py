"""Checks of configurations and models: raise an error for what stages cannot compute exactly."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from hf_gpipe.errors import UnsupportedModelError, UserError


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
            found = "set" if value is True else "above 0"
            raise UnsupportedModelError(f"{family}: {name} is {found}, and {what} cannot be on another stage")


def check_as_configured(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Raise UserError where a model in memory differs from a model built from its configuration.

    Stages are built from the configuration, so a change of the modules alone would be lost silently.

    Args:
        model: the model in memory.
        expected: the same model built from its configuration, on any device.
    """
    family = model.config.model_type
    found, wanted = dict(model.named_modules()), dict(expected.named_modules())
    for name in found.keys() ^ wanted.keys():
        where = "not made by its configuration" if name in found else "in its configuration alone"
        raise UserError(f"{family}: the model's module {name!r} is {where}, from which the stages are built")
    for name, module in found.items():
        what = f"{family}: the module {name or 'at the root'!r}"
        if type(module).__qualname__ != type(wanted[name]).__qualname__:
            kinds = type(module).__qualname__, type(wanted[name]).__qualname__
            raise UserError(f"{what} is a {kinds[0]} where the configuration makes a {kinds[1]}")
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # transformers leaves hooks of its own once it has recorded outputs; they do nothing in a pipeline.
        if any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks):
            raise UserError(f"{what} has forward hooks, which stages would not run; remove them")
        for attribute, value in _scalars(wanted[name]).items():
            if name and (own := vars(module).get(attribute)) != value:
                raise UserError(
                    f"{what} has {attribute}={own!r} and its configuration makes {value!r}; change the configuration, "
                    "and make the model from it"
                )
    names = {n for n, _ in expected.named_parameters(remove_duplicate=False)}
    if extra := {n for n, _ in model.named_parameters(remove_duplicate=False)} ^ names:
        raise UserError(f"{family}: the parameter {sorted(extra)[0]!r} and the model's configuration do not agree")
    if odd := _aliases(model) ^ _aliases(expected):
        raise UserError(
            f"{family}: the model and its configuration do not tie the same weights: {', '.join(sorted(odd.pop()))}; "
            "set tie_word_embeddings in the configuration to what the model does"
        )


def _scalars(module: nn.Module) -> dict[str, Any]:
    """Plain attributes set by a module's configuration; none that a forward or a resize changes."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
        and not name.startswith("_")
        and name not in ("training", "gradient_checkpointing", "vocab_size", "support_avx512bf16_for_cpu")
        and "cached" not in name
    }


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
    heads |= set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
    if ours and not any(c.__name__ in heads for c in ours):
        raise UnsupportedModelError(
            f"{model.config.model_type}: {type(model).__name__} is no class of AutoModelForCausalLM, "
            "AutoModelForSeq2SeqLM or AutoModelForSequenceClassification, which read text; give a model of one of those"
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UserError(
            "the model is spread over devices by its device_map; load it without device_map, or give its directory"
        )
