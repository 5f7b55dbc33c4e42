"""PEFT adapters (LoRA and other layer-wise methods) on a model in stages.

PEFT itself puts its layers into each stage's model and decides their names, what is frozen and the saved format.
`peft` is an optional dependency, imported only where adapters are used.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.modules.head import FoundProjection
from hf_gpipe.adapters.observation.skeleton import NoRandomValues
from hf_gpipe.adapters.stubs import STUBS
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.libraries.torch import saved_buffers_of
from hf_gpipe.libraries.transformers import is_peft_available


def values_where_they_stay(model: nn.Module) -> NoRandomValues | nullcontext[None]:
    """Context manager for injections: into a model on the meta device PEFT moves what it has filled on the CPU."""
    on_meta = all(parameter.is_meta for parameter in model.parameters())
    return NoRandomValues(everywhere=True) if on_meta else nullcontext()


@dataclass(frozen=True)
class Wrapped:
    """A module that PEFT wraps whole, beside the layers that get adapters.

    Attributes:
        module: its name in the whole model.
        tokens: the rows of an embedding that are trained alone (`trainable_token_indices`); None: the module has a
            copy that is trained (`modules_to_save`).
        tied_to: the wrapped module whose trained tensors it uses, or None.
    """

    module: str
    tokens: tuple[int, ...] | None = None
    tied_to: str | None = None


@dataclass(frozen=True)
class PeftAdapter:
    """A PEFT adapter.

    Attributes:
        name: the adapter's name in the model.
        config: the adapter's configuration, with the names of the target modules.
        wrapped: the modules that are wrapped whole. A module comes before the modules that are tied to it.
        trained: the names of all trained parameters of the whole model.
        ties: name of each tied parameter of the whole model with its adapters -> the name that it is known by.
        saves_embeddings: whether the saved adapters have the embeddings and the head, as PEFT saves them where they
            are targets or have another size than those of the model that the adapters belong to.
    """

    name: str
    config: Any
    wrapped: tuple[Wrapped, ...]
    trained: frozenset[str]
    ties: dict[str, str]
    saves_embeddings: bool

    def inject(self, model: PreTrainedModel) -> None:
        """Put the adapter's layers into a model or a stage of it and freeze everything else."""
        from peft import inject_adapter_in_model

        from hf_gpipe.libraries.peft import cast_adapter_dtype, check_target_module_exists

        # Layers of other stages are stubs. Of another stage's first block, whose table of positions this stage uses,
        # modules are there without weights, as plain `nn.Module` (position_tables.py). And PEFT puts no adapters into
        # what is trained whole.
        whole = tuple(f"{wrapped.module}." for wrapped in self.wrapped if wrapped.tokens is None)
        absent = [
            name
            for name, module in model.named_modules()
            if isinstance(module, STUBS) or type(module) is nn.Module or f"{name}.".startswith(whole)
        ]
        targets = tuple(getattr(self.config, "target_parameters", None) or ())
        present = {name: module for name, module in model.named_modules() if name not in absent}
        if any(check_target_module_exists(self.config, name) for name in present) or any(
            f".{name}.{own}".endswith(tuple(f".{target}" for target in targets))
            for name, module in present.items()
            for own in module._parameters
        ):
            config = before_injection(self.config)
            # PEFT would also wrap stubs, and looks for what is tied to them.
            config.modules_to_save = config.trainable_token_indices = config.modules_to_tie = None
            config.ensure_weight_tying = False
            if absent:
                config.exclude_modules = _also_excluded(getattr(config, "exclude_modules", None), absent)
            with _having_input_embeddings(model), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT has warned about the whole model; a stage's warnings are noise
                with values_where_they_stay(model):
                    inject_adapter_in_model(config, model, self.name)
        elif not getattr(model, "peft_config", None):
            model.peft_config = {self.name: self.config}
        modules = dict(model.named_modules())
        for wrapped in self.wrapped:
            if wrapped.module in modules and next(modules[wrapped.module].parameters(), None) is not None:
                self._wrap(model, wrapped)
        cast_adapter_dtype(model, self.name)  # to float32, as get_peft_model does
        names = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in names.items():
            parameter.requires_grad_(name in self.trained)
        model.all_tied_weights_keys = {alias: source for alias, source in self.ties.items() if source in names}

    def _wrap(self, model: PreTrainedModel, wrapped: Wrapped) -> None:
        from hf_gpipe.libraries.peft import ModulesToSaveWrapper, TrainableTokensWrapper

        module = model.get_submodule(wrapped.module)
        source: Any = None if wrapped.tied_to is None else model.get_submodule(wrapped.tied_to)
        wrapper: Any
        if wrapped.tokens is None:
            tied = None if source is None else source.modules_to_save[self.name]
            wrapper = ModulesToSaveWrapper(module, self.name, tied_module=tied)
        else:
            tied = None if source is None else source.token_adapter
            wrapper = TrainableTokensWrapper(module, self.name, token_indices=list(wrapped.tokens), tied_adapter=tied)
        wrapper.set_adapter(self.name)
        model.set_submodule(wrapped.module, wrapper)

    def projection(self, plain: FoundProjection, model: PreTrainedModel) -> FoundProjection:
        """Return the projection of the head as it is found in `model`, the whole model with its adapters."""
        names: list[str] = []
        for name in plain.names:
            wrapped = next((entry.module for entry in self.wrapped if f"{name}.".startswith(f"{entry.module}.")), None)
            if wrapped is None:
                names.append(name)
            else:
                rest = name.removeprefix(wrapped)
                names += [f"{wrapped}.modules_to_save.{self.name}{rest}", f"{wrapped}.original_module{rest}"]
        modules = dict(model.named_modules())
        if not all(name in modules and type(modules[name]).forward is nn.Linear.forward for name in names):
            return FoundProjection((), "its head has PEFT adapters")
        return FoundProjection(tuple(names), plain.reason)

    def reset(self, model: nn.Module, plant: Callable[[str], object]) -> None:
        """Initialise the weights of the adapter's layers again, from the weights where the configuration asks for it.

        Args:
            model: the model, with its weights.
            plant: seeds the generator from the name of a module.

        Raises:
            UserError: the values cannot be computed on the device of the weights.
        """
        start = getattr(self.config, "init_lora_weights", True)
        for path, module in model.named_modules():
            layer: Any = module
            if not hasattr(module, "reset_lora_parameters"):
                continue
            plant(path)
            if self.name in layer.lora_embedding_A:
                layer.reset_lora_parameters(self.name, True)
            elif self.name not in layer.lora_A:
                continue
            elif start is False:  # then PEFT does not initialise them
                for factor in (layer.lora_A, layer.lora_B):
                    factor[self.name].reset_parameters()
            elif str(start).startswith("pissa"):
                layer.pissa_init(self.name, start)
            elif str(start).lower() == "olora":
                layer.olora_init(self.name)
            elif start == "loftq":
                try:
                    layer.loftq_init(self.name, self.config)
                except (AssertionError, RuntimeError, ValueError) as error:
                    raise UserError(
                        f"init_lora_weights='loftq': peft computes the initial values of {path} on CUDA, with "
                        f"bitsandbytes: {error}; use 'pissa', 'olora' or True elsewhere"
                    ) from error
            else:
                layer.reset_lora_parameters(self.name, start)

    def merge(self, model: PreTrainedModel) -> None:
        """Let PEFT merge the adapter into the weights of a model or a stage of it, and take its layers out.

        Raises:
            UnsupportedModelError: PEFT cannot merge such adapters.
        """
        from hf_gpipe.libraries.peft import tuner_around

        for path, module in model.named_modules():
            if any(getattr(module, "lora_bias", {}).values()) and getattr(module, "bias", None) is None:
                raise UnsupportedModelError(f"lora_bias: {path} has no bias, into which peft could merge the adapter's")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the embedding and the head are no longer tied
                tuner_around(model, self.name, self.config).merge_and_unload()
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedModelError(
                f"peft cannot merge adapters of {self.config.peft_type.value}: {error or 'it has no merging for them'}"
            ) from error

    def saved_names(self, model: PreTrainedModel) -> dict[str, str]:
        """The model's own names of the adapter's tensors in it, or in a stage, by those of PEFT's saved format.

        A tensor that is tied has several names, as in PEFT's own files.
        """
        from peft import get_peft_model_state_dict

        state = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
        for path, module in model.named_modules():  # some methods save what is not trained, such as indices
            state |= {f"{path}.{name}": buffer for name, buffer in saved_buffers_of(module).items()}
        with _having_input_embeddings(model):
            tensors = get_peft_model_state_dict(
                model, state_dict=state, adapter_name=self.name, save_embedding_layers=self.saves_embeddings
            )
        names = {id(tensor): name for name, tensor in state.items()}
        return {f"base_model.model.{name}": names[id(tensor)] for name, tensor in tensors.items()}


def tensor_of(model: nn.Module, name: str) -> torch.Tensor:
    """Return the parameter or buffer of this name."""
    path, _, last = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), last)
    return tensor.detach()


@contextmanager
def _having_input_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which PEFT can ask a stage for its input embeddings, also where a stub stands around them."""
    try:
        model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        none = nn.Module()
        model.__dict__["get_input_embeddings"] = lambda: none
    try:
        yield
    finally:
        model.__dict__.pop("get_input_embeddings", None)


def _also_excluded(given: Any, names: list[str]) -> Any:
    """PEFT's `exclude_modules`, None, a list or a regular expression, with more names."""
    if isinstance(given, str):
        return "|".join([f"(?:{given})", *(re.escape(name) for name in names)])
    return [*(given or ()), *names]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model, or a stage of it, computes without its adapters and with its own modules."""
    from hf_gpipe.libraries.peft import AuxiliaryTrainingWrapper, BaseTunerLayer

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    # PEFT freezes adapters that it turns off, and unfreezes all of them afterwards.
    trained = {parameter: parameter.requires_grad for layer in layers for parameter in layer.parameters()}
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, is_trained in trained.items():
            parameter.requires_grad_(is_trained)


def find_peft(model: Any, given: Any) -> tuple[Any, tuple[str, Any] | None]:
    """The base model under a PEFT model, and the name and configuration of its adapter.

    Args:
        model: the first argument of `Pipeline`.
        given: a PeftConfig for adapters to be added, or None.

    Raises:
        UserError: the model has adapters and `given` asks for new ones, or the model has several, or its adapters are
            merged, turned off or not the active ones, or it was compiled.
    """
    if "_orig_mod" in getattr(model, "_modules", ()):
        raise UserError(
            "the model was compiled by torch.compile, and stages would run it without; give the model before that, and "
            "set torch_compile=True, so that stages compile blocks"
        )
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Only the wrapper knows of prompt learning.
    of_wrapper = getattr(model, "peft_config", None) if base is not model else None
    present = dict(of_wrapper or getattr(base, "peft_config", None) or {}) if isinstance(base, PreTrainedModel) else {}
    if present and given is not None:
        raise UserError("the model already has PEFT adapters; leave peft_config out")
    if len(present) > 1:
        raise UserError(f"the model has {len(present)} PEFT adapters ({', '.join(present)}); train one at a time")
    if present:
        (name,) = present
        _check_state(base, name)
        return base, (name, present[name])
    return base, None if given is None else ("default", given)


def _check_state(model: PreTrainedModel, name: str) -> None:
    """Raise UserError where a model with adapters computes without them, or has them in its weights already."""
    from hf_gpipe.libraries.peft import BaseTunerLayer

    for where, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if module.merged:
            raise UserError(
                f"the adapters of {where} are merged into its weights, and stages would add them again; call "
                "unmerge_adapter(), or merge_and_unload() to train without adapters"
            )
        if module.disable_adapters:
            raise UserError(
                f"the adapters of {where} are turned off, and stages would use them; call enable_adapter_layers(), or "
                "unload() to train without adapters"
            )
        if list(module.active_adapters) != [name]:
            raise UserError(
                f"the active adapters of {where} are {module.active_adapters}, and the model has {name!r}; call "
                f"set_adapter({name!r})"
            )


def before_injection(config: Any) -> Any:
    """A copy of a configuration as it is before PEFT reads the model, whose adapters take no values from weights.

    Stages get or draw the values later.
    """
    config = copy.deepcopy(config)
    if isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = False
    if hasattr(config, "fan_in_fan_out"):
        config.fan_in_fan_out = False  # PEFT sets it when it comes upon the first Conv1D
    return config


def need_peft() -> None:
    """Raise UserError where peft is not installed."""
    if not is_peft_available():
        raise UserError("PEFT adapters need the package peft: pip install 'hf_gpipe[peft]'")
