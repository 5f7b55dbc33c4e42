"""The private and undocumented names of transformers that models need; those of its trainer are beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin  # what the slots of all caches are
from transformers.cache_utils import DynamicLayer as DynamicLayer  # the keys and values of one block
from transformers.cache_utils import DynamicSlidingWindowLayer as DynamicSlidingWindowLayer  # those of a window
from transformers.conversion_mapping import get_model_conversion_mapping as get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter as WeightConverter  # several tensors of a file into one
from transformers.core_model_loading import WeightRenaming as WeightRenaming  # another name for a tensor of a file
from transformers.core_model_loading import rename_source_key as rename_source_key  # a file's name -> the model's
from transformers.core_model_loading import revert_weight_conversion as revert_weight_conversion  # for a file
from transformers.dynamic_module_utils import custom_object_save as custom_object_save  # a model's own code
from transformers.integrations.sdpa_attention import repeat_kv as repeat_kv  # grouped heads -> all heads
from transformers.loss.loss_utils import LOSS_MAPPING as LOSS_MAPPING  # the loss of each `loss_type`
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer as GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import LoadStateDictConfig
from transformers.modeling_utils import local_torch_dtype as local_torch_dtype  # the default type, within it
from transformers.models.auto import modeling_auto as modeling_auto  # the auto classes' tables of families
from transformers.models.auto.image_processing_auto import (  # 5.17 gives them from this path, without torchvision
    IMAGE_PROCESSOR_MAPPING_NAMES as IMAGE_PROCESSOR_MAPPING_NAMES,  # the processors of images by `model_type`
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor as AutoImageProcessor  # reads one
from transformers.pytorch_utils import Conv1D as Conv1D  # GPT-2's linear layer, whose weight is (in, out)
from transformers.quantizers.auto import AutoHfQuantizer as AutoHfQuantizer  # what quantises a model's weights
from transformers.quantizers.auto import AutoQuantizationConfig as AutoQuantizationConfig
from transformers.utils import CONFIG_NAME as CONFIG_NAME
from transformers.utils import GENERATION_CONFIG_NAME as GENERATION_CONFIG_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from transformers.utils import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from transformers.utils import ModelOutput as ModelOutput
from transformers.utils import cached_file as cached_file  # the path of a file of a Hub id or directory
from transformers.utils import is_bitsandbytes_available as is_bitsandbytes_available
from transformers.utils import is_peft_available as is_peft_available

from hf_gpipe.errors import UnsupportedModelError

#: The classes of models by the classes of their configurations, or with `_NAMES` by `model_type`, by name.
MODEL_FOR_CAUSAL_LM_MAPPING = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
MODEL_FOR_MASKED_LM_MAPPING = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING
MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

# ---------------------------------------------------------------------- configurations and building


def attention_implementation(config: Any) -> Any:
    """The attention that a configuration chooses, such as "sdpa"; None: it has none, or leaves it to the library."""
    return getattr(config, "_attn_implementation", None)


def with_eager_experts(config: PreTrainedConfig) -> None:
    """Let experts be computed one after another; grouped products do not support every type."""
    config._experts_implementation = "eager"


def commit_of(config: PreTrainedConfig) -> str | None:
    """The commit of the Hub's repository that a configuration was read from."""
    return getattr(config, "_commit_hash", None)


def source_of(config: Any) -> str:
    """The Hub id or directory that a model or its configuration was read from, or ""."""
    return getattr(getattr(config, "config", config), "_name_or_path", "")


#: Attributes of a configuration that say where it comes from.
OF_SOURCE = ("_name_or_path", "name_or_path")


def from_config(cls: type[PreTrainedModel], config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model of a class with random weights; `options` are those of the auto classes' `from_config`."""
    model: PreTrainedModel = cls._from_config(config, **options)
    return model


def heeds_attention(model: PreTrainedModel) -> bool:
    """Whether a model's code calls the attention that its configuration chooses, with the arguments of its forward."""
    return bool(getattr(model, "_supports_attention_backend", False))


# ---------------------------------------------------------------------- weights


#: Methods that fill the weights of a new model's modules.
INITIALISERS = ("_init_weights",)


def fill_module(model: Any, module: nn.Module) -> None:
    """Fill the weights and buffers of one module of a model with new values, those that are not marked."""
    with torch.no_grad():
        model._init_weights(module)


def forget_initialisation(model: nn.Module) -> None:
    """Remove the marks "initialised", which building on the meta device sets although nothing was filled."""
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]


def allocate(model: PreTrainedModel, device: torch.device) -> None:
    """Give every tensor of a model on the meta device memory on another one."""
    model._move_missing_keys_from_meta_to_device(set(model.state_dict()), {"": device}, None, None)


def fill_unmarked(model: PreTrainedModel) -> None:
    """Fill the weights of a model that are not marked "initialised" with new values."""
    model._initialize_missing_keys(False)


def load_files(
    model: PreTrainedModel,
    files: Sequence[Path],
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    quantizer: Any,
    *,
    accepts_shapes: bool = False,
) -> Iterator[Any]:
    """Fill a model with the tensors of safetensors files, by the library's own conversions.

    Returns:
        What the library says of the loading: first after the files are read, with `mismatched_keys` and both shapes of
        each; then after the rest has new values, with `missing_keys`. The last step raises RuntimeError where a shape
        differs, unless with `accepts_shapes`, where such a parameter has new values too.
    """
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=source,
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model, hf_quantizer=quantizer),
        hf_quantizer=quantizer,
        ignore_mismatched_sizes=accepts_shapes,
    )
    info, _ = PreTrainedModel._load_pretrained_model(model, None, [str(file) for file in files], config)
    yield info
    yield PreTrainedModel._finalize_model_loading(model, config, info)


def drop_expected_keys(model: PreTrainedModel, info: Any) -> None:
    """Take from `info.missing_keys` and `info.unexpected_keys` what the model's class says may be missing or left."""
    model._adjust_missing_and_unexpected_keys(info)


def unsaved_keys(model: Any) -> set[str]:
    """The names of the parameters that a model's class does not save, because it makes them anew.

    A table of Marian's positions that was read is trained by transformers 5.24: one that has changed is saved.
    """
    names = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name in [n for n, p in model.named_parameters() if n in names and p.requires_grad and not p.is_meta]:
        path, _, leaf = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(path))
        forget_initialisation(module)
        with torch.random.fork_rng(devices=[]):
            fill_module(model, module)
        if not torch.equal(module.get_parameter(leaf), model.get_parameter(name)):
            names.discard(name)
    return names


# ---------------------------------------------------------------------- forwards


def checkpoint_with(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let a module run its blocks, or itself, by a function that runs them again in backward, also with a cache."""
    module._gradient_checkpointing_func = function  # type: ignore[assignment]
    module.gradient_checkpointing = True  # type: ignore[assignment]
    # A block that runs again writes the same keys and values again: the cache of a part of a row may be kept.
    module._can_checkpoint_with_cache = True  # type: ignore[assignment]


#: The mark of a model that its first forward put hooks into, which capture outputs such as routers' logits.
CAPTURES_OUTPUTS = "_output_capturing_hooks_installed"

#: The attribute of a model with a loss that was put on it.
LOSS_ATTRIBUTE = "_loss_function"


@contextmanager
def rows_of_one_text() -> Iterator[None]:
    """Context manager in which each row is one text: the values of position ids are not searched for documents.

    Fake tensors have no values, and the library would write a mask of tokens by tokens that no run has.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def cache_argument(model: PreTrainedModel) -> str:
    """The argument by which `generate` gives a model its cache; the model's output has a field of the same name.

    It is `cache` since transformers 5.24; before, it is `past_key_values`, or `cache_params` of Mamba and its like.

    Raises UnsupportedModelError where the model's forward has no such argument.
    """
    given = signature(GenerationMixin.prepare_inputs_for_generation).parameters
    names = [name for name in ("cache", "past_key_values") if name in given] + ["cache_params"]
    for name in names:
        if name in signature(model.forward).parameters:
            return name
    raise UnsupportedModelError(
        f"{type(model).__name__}: its forward has no argument {names[0]!r}, by which generate gives a model its keys "
        "and values; generate with use_cache=False"
    )
