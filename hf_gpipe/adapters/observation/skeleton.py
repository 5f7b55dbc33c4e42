"""Build the whole Hugging Face model: on the meta device without memory, or with random weights."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_gpipe.adapters.guards import check_attention, check_config, check_sizes
from hf_gpipe.errors import UserError, one_line
from hf_gpipe.libraries.transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    from_config,
)


@dataclass(frozen=True)
class Blueprint:
    """The configuration that a Hugging Face model is built from, and the options beside it.

    Attributes:
        config: the model's configuration.
        dtype: the type of the weights.
        attn_implementation: "eager", "sdpa" ...; None: transformers chooses.
        model_class: class of the model; None: the one that transformers' auto classes choose for the configuration.
        trust_remote_code: whether a configuration may name Python code outside of transformers.
    """

    config: PreTrainedConfig
    dtype: torch.dtype = torch.float32
    attn_implementation: str | None = None
    model_class: type[PreTrainedModel] | None = None
    trust_remote_code: bool = False


def build_skeleton(blueprint: Blueprint) -> PreTrainedModel:
    """Build a model on the meta device: every module and name, no weights.

    Raises UserError where the configuration asks for something that stages cannot compute exactly, is absurd, or is one
    that transformers makes no model of.
    """
    check_sizes(blueprint.config.to_dict())
    check_config(blueprint.config)
    try:
        with torch.device("meta"), NoRandomValues():
            return build(blueprint)
    except UserError:
        raise
    except Exception as error:  # of a value that no check has found, such as an unknown hidden_act, it may be any
        raise UserError(
            f"transformers makes no model of the configuration of {blueprint.config.model_type}: "
            f"{type(error).__name__}: {one_line(str(error))}; correct the values in it"
        ) from error


def auto_class_of(config: PreTrainedConfig) -> Any:
    """The auto class of a language model: one that reads images too only where its family has no other."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    family = type(config)
    reads_images = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and family not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def build(blueprint: Blueprint) -> PreTrainedModel:
    """Build a model with random weights on torch's default device.

    Raises UserError for an attention that is not installed.
    """
    attention, dtype = blueprint.attn_implementation, blueprint.dtype
    check_attention(blueprint.config, attention)
    config = copy.deepcopy(blueprint.config)  # transformers changes it
    options = {} if attention is None else {"attn_implementation": attention}
    if blueprint.model_class is not None:
        return from_config(blueprint.model_class, config, dtype=dtype, **options)
    auto = auto_class_of(config)
    return auto.from_config(config, dtype=dtype, trust_remote_code=blueprint.trust_remote_code, **options)


class NoRandomValues(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled with random values.

    Without this, GPT-2 takes 5 times as long to build on the meta device.

    Args:
        everywhere: whether tensors with memory are left too.
    """

    _fills = (
        *(torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_),
        *(torch.Tensor.normal_, torch.Tensor.uniform_),
    )

    def __init__(self, *, everywhere: bool = False) -> None:
        super().__init__()
        self._everywhere = everywhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._fills:
            tensor = args[0] if args else kwargs["tensor"]
            if self._everywhere or tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def copy_with_stubs(model: Any, stubs: Mapping[str, nn.Module]) -> Any:
    """A copy of a model on the meta device with stubs in place of some modules, of which nothing is copied.

    To build the model anew takes several times as long, and a stage needs few of its layers.

    Args:
        model: the model. No module of it is in a closure (see `has_closures`).
        stubs: the stubs, by the name of the module that each replaces.
    """
    modules = {name: model.get_submodule(name) for name in stubs}
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    is_alone = {name: places[id(module)] == 1 for name, module in modules.items()}
    # A copy does not go into what is there already.
    copied = _copied(model, {id(modules[name]): stub for name, stub in stubs.items() if is_alone[name]})
    for name, stub in stubs.items():
        if not is_alone[name]:  # in its other places the module stays
            copied.set_submodule(name, stub)
    return copied


def _copied(module: nn.Module, there: dict[int, Any]) -> Any:
    """`copy.deepcopy` with the memo `there`, in half of the time, of modules that it would copy by their attributes."""
    cls = type(module)
    if id(module) in there or hasattr(cls, "__deepcopy__") or _ways_to_copy(cls) != _ways_to_copy(nn.Module):
        return copy.deepcopy(module, there)
    copied = there[id(module)] = cls.__new__(cls)
    for child in module.children():
        _copied(child, there)
    copied.__setstate__({name: v if type(v) in _PLAIN else _copied_value(v, there) for name, v in vars(module).items()})
    return copied


def _ways_to_copy(cls: type[nn.Module]) -> tuple[Any, ...]:
    """A class's functions for copies of its modules; torch.compile exchanges one of nn.Module's when it first runs."""
    return cls.__reduce_ex__, cls.__reduce__, cls.__getstate__, cls.__setstate__


def _copied_value(value: Any, there: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _COLLECTIONS and id(value) not in there:
        if not value:  # most of a module are such collections, as for hooks
            return there.setdefault(id(value), kind())
        if kind is dict:
            copied = there[id(value)] = {}
            copied.update({_copied_value(key, there): _copied_value(entry, there) for key, entry in value.items()})
            return copied
    return copy.deepcopy(value, there)


_PLAIN = {bool, int, float, str, type(None), torch.dtype}
_COLLECTIONS = (dict, OrderedDict, set)


def has_closures(model: nn.Module) -> bool:
    """Whether a function that a module keeps, or one of its hooks, closes over a module: a copy would share it."""
    kept = (value for module in model.modules() for value in vars(module).values())
    functions = (f for value in kept for f in (value.values() if isinstance(value, dict) else (value,)))
    cells = (cell for f in functions if isinstance(f, FunctionType) for cell in f.__closure__ or ())
    return any(isinstance(_content_of(cell), nn.Module) for cell in cells)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
