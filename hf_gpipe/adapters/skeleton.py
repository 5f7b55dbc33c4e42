"""Build the whole Hugging Face model: on the meta device without memory, or with random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from hf_gpipe.adapters.guards import check_attention, check_config, check_sizes


def build_skeleton(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model of `config` on the meta device: every module and name, no weights.

    Raises UserError where the configuration asks for something that stages cannot compute exactly, or is absurd.
    """
    check_sizes(config.to_dict())
    check_config(config)
    with torch.device("meta"), _NoRandomValues():
        return build(config, dtype, attn_implementation, model_class, trust_remote_code=trust_remote_code)


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The auto class of a language model: one that reads images too only where its family has no other."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    family = type(config)
    reads_images = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and family not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def build(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model of `config` with random weights on torch's default device.

    Without `model_class` it is the class that transformers' auto classes choose. Raises UserError for an attention that
    is not installed.
    """
    check_attention(config, attn_implementation)
    config = copy.deepcopy(config)  # transformers changes it
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if model_class is not None:
        return model_class._from_config(config, dtype=dtype, **options)
    auto = auto_class_of(config)
    return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **options)


class _NoRandomValues(TorchFunctionMode):
    """Leaves tensors of the meta device as they are: without this, GPT-2 takes 5 times as long to build there."""

    _fills = (
        *(torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_),
        *(torch.Tensor.normal_, torch.Tensor.uniform_),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._fills and (tensor := args[0] if args else kwargs["tensor"]).is_meta:
            return tensor
        return func(*args, **kwargs)
