"""The private and undocumented names of peft, which a machine may be without: import this module where it is needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING as PEFT_TYPE_TO_TUNER_MAPPING  # the class of each method's model
from peft.tuners.lora import Embedding as LoraEmbedding  # noqa: F401  # an embedding with LoRA
from peft.tuners.tuners_utils import BaseTuner as BaseTuner  # the model that a method makes of another
from peft.tuners.tuners_utils import BaseTunerLayer as BaseTunerLayer  # a layer with adapters around another
from peft.tuners.tuners_utils import cast_adapter_dtype as cast_adapter_dtype  # half-precision adapters in float32
from peft.tuners.tuners_utils import check_target_module_exists as check_target_module_exists  # whether one is named
from peft.utils.constants import EMBEDDING_LAYER_NAMES as EMBEDDING_LAYER_NAMES  # saved where they are targets
from peft.utils.other import AuxiliaryTrainingWrapper as AuxiliaryTrainingWrapper  # around a module trained whole
from peft.utils.other import ModulesToSaveWrapper as ModulesToSaveWrapper  # that of `modules_to_save`
from peft.utils.other import TrainableTokensWrapper as TrainableTokensWrapper  # that of `trainable_token_indices`
from torch import nn


def changes_injection(tuner: type[BaseTuner]) -> bool:
    """Whether a method does something of its own to the whole model before or after the layers get adapters."""
    own, plain = ((cls._pre_injection_hook, cls._post_injection_hook) for cls in (tuner, BaseTuner))
    return own != plain


@contextmanager
def before_each_layer(method: Any, call: Callable[[str], object]) -> Iterator[None]:
    """Context manager in which peft calls a function with the name of each module before it makes the adapters of it.

    Args:
        method: the configuration's `peft_type`.
        call: the function.
    """
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[method]
    create = tuner._create_and_replace

    @functools.wraps(create)
    def calling(*args: Any, **options: Any) -> Any:
        call(options.get("current_key", args[-1]))
        return create(*args, **options)

    is_own = "_create_and_replace" in vars(tuner)
    tuner._create_and_replace = calling
    try:
        yield
    finally:
        if is_own:
            tuner._create_and_replace = create
        else:
            del tuner._create_and_replace


def tuner_around(model: nn.Module, name: str, config: Any) -> Any:
    """The model of an adapter's method around a model that has its layers; its constructor would put layers in."""
    tuner: Any = object.__new__(PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type])
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config, tuner.active_adapter = model, {name: config}, name
    tuner.targeted_module_names, tuner.targeted_parameter_names = [], []
    return tuner


def model_around(model: nn.Module, name: str, config: Any) -> PeftModel:
    """peft's model of the adapter's task around a model that has its layers."""
    shown: Any = object.__new__(MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel))
    nn.Module.__init__(shown)
    shown.active_adapter, shown.peft_type = name, config.peft_type
    shown.special_peft_forward_args = {"adapter_names", "alora_offsets"}
    shown._is_prompt_learning, shown._peft_config, shown._adapters_disabled = False, None, False
    shown.base_model = tuner_around(model, name, config)
    return shown
