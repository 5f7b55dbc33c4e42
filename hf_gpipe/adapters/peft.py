"""PEFT adapters (LoRA and other layer-wise methods) on a model in stages.

PEFT itself puts its layers into each stage's model and decides their names, what is frozen and the saved format.
`peft` is an optional dependency, imported only where adapters are used.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from hf_gpipe.adapters.base import Adapter
from hf_gpipe.errors import UnsupportedModelError, UserError


@dataclass(frozen=True)
class PeftAdapter:
    """A PEFT adapter.

    Attributes:
        name: in the model.
        config: its configuration, with the names of the target modules.
        trained_whole: the modules that are trained beside the adapters: the head of a classifier, or none.
    """

    name: str
    config: Any
    trained_whole: tuple[str, ...] = ()

    def inject(self, model: PreTrainedModel) -> None:
        """Put the adapter's layers into a model or a stage of it and freeze everything else."""
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype, check_target_module_exists
        from peft.utils import ModulesToSaveWrapper

        # Of another stage's first block, whose table of positions this stage uses, modules are there without weights.
        empty = [name for name, module in model.named_modules() if type(module) is nn.Module]
        if any(check_target_module_exists(self.config, name) for name, _ in model.named_modules() if name not in empty):
            config = _without_start(self.config)
            config.modules_to_save = None  # PEFT would also wrap the stubs of other stages
            if empty:
                config.exclude_modules = _also_excluded(config.exclude_modules, empty)
            with _having_input_embeddings(model):
                inject_adapter_in_model(config, model, self.name)
            cast_adapter_dtype(model, self.name)  # to float32, as get_peft_model does
        else:
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        for name in self.trained_whole:
            module = model.get_submodule(name)
            if next(module.parameters(), None) is not None:
                wrapper = ModulesToSaveWrapper(module, self.name)
                wrapper.set_adapter(self.name)
                model.set_submodule(name, wrapper)
                if not getattr(model, "peft_config", None):
                    model.peft_config = {self.name: self.config}

    def reset(self, model: nn.Module) -> None:
        """Initialise the weights of the adapter's layers again."""
        for module in model.modules():
            reset: Any = getattr(module, "reset_lora_parameters", None)
            if reset is not None and self.name in getattr(module, "lora_A", {}):
                reset(self.name, self.config.init_lora_weights)
                if self.config.init_lora_weights is False:  # then PEFT does not initialise them
                    factors: Any = (module.lora_A, module.lora_B)
                    for factor in factors:
                        factor[self.name].reset_parameters()

    def tensors(self, model: PreTrainedModel, owned: dict[str, Any]) -> dict[str, Any]:
        """The adapter's tensors among `owned`, under the names of PEFT's saved format."""
        from peft import get_peft_model_state_dict

        if not getattr(model, "peft_config", None):
            return {}
        state = get_peft_model_state_dict(model, state_dict=owned, adapter_name=self.name, save_embedding_layers=False)
        return {f"base_model.model.{name}": tensor for name, tensor in state.items()}


@contextmanager
def _having_input_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which PEFT can ask a stage for its input embeddings, also where a stub stands around them."""
    try:
        model.get_input_embeddings()
    except AttributeError:
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
    """Context manager in which a model, or a stage of it, computes without its adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
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
            merged, turned off or not the active ones.
        UnsupportedModelError: `given` asks for initial values that are computed from the weights.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Of prompt learning only the wrapper knows.
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
    if isinstance(start := getattr(given, "init_lora_weights", None), str) and start not in _PLAIN_STARTS:
        raise UnsupportedModelError(
            f"init_lora_weights={start!r} is computed from the weights, or from data, and changes the weights; let "
            "peft.get_peft_model make the adapters, and give that model, or use True or 'gaussian'"
        )
    return base, None if given is None else ("default", given)


#: Values of `init_lora_weights` that do not read the weights.
_PLAIN_STARTS = ("gaussian",)


def _check_state(model: PreTrainedModel, name: str) -> None:
    """Raise UserError where a model with adapters computes without them, or has them in its weights already."""
    from peft.tuners.tuners_utils import BaseTunerLayer

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


def _without_start(config: Any) -> Any:
    """A copy of a configuration whose adapters take no initial values from weights: stages get or draw them later."""
    config = copy.deepcopy(config)
    if isinstance(getattr(config, "init_lora_weights", None), str):
        config.init_lora_weights = False
    return config


def need_peft() -> None:
    """Raise UserError where peft is not installed."""
    if not is_peft_available():
        raise UserError("PEFT adapters need the package peft: pip install 'hf_gpipe[peft]'")


def make_peft(adapter: Adapter, name: str, config: Any) -> PeftAdapter:
    """Let PEFT resolve its configuration on the whole model, on the meta device.

    Raises:
        UserError: peft is not installed.
        UnsupportedModelError: the method or its target modules cannot be split over stages.
    """
    need_peft()
    from peft import inject_adapter_in_model

    family = adapter.config.model_type
    if config.is_prompt_learning:
        raise UnsupportedModelError(
            f"{family}: PEFT's prompt learning is not supported; use LoRA on linear layers of the blocks"
        )
    resolved = copy.deepcopy(config)
    trained_whole = _trained_whole(adapter, resolved)
    whole = adapter.skeleton()
    try:
        inject_adapter_in_model(known := _without_start(resolved), whole, name)
        resolved.target_modules = known.target_modules
    except ValueError as error:
        raise UnsupportedModelError(f"{family}: {error}") from error
    blocks = [block for stack in adapter.stacks for block in stack.blocks]
    inside = tuple(f"{module}." for module in (*blocks, *trained_whole))
    outside = [n for n, p in whole.named_parameters() if p.requires_grad and not n.startswith(inside)]
    if outside:
        raise UnsupportedModelError(
            f"{family}: PEFT would adapt {outside[0]!r}, outside of the blocks; leave embeddings and head out of "
            "target_modules"
        )
    return PeftAdapter(name, resolved, trained_whole)


def _trained_whole(adapter: Adapter, config: Any) -> tuple[str, ...]:
    """The modules that `modules_to_save` names, to which the head of a classifier is added, as PEFT does.

    Raises UnsupportedModelError for others.
    """
    asked = list(getattr(config, "modules_to_save", None) or ())
    if adapter.is_classifier and config.task_type == "SEQ_CLS":
        asked += [name for name in ("classifier", "score") if name not in asked]
        config.modules_to_save = asked
    found = tuple(name for name, _ in adapter.reference.named_modules() if name.endswith(tuple(asked)))
    if asked and (not adapter.is_classifier or found != (adapter.layers[-1].name,)):
        raise UnsupportedModelError(
            f"{adapter.config.model_type}: PEFT's modules_to_save={asked} is not supported, except for the head of a "
            "model that classifies rows; use LoRA on linear layers of the blocks"
        )
    return found
