"""Resolve a PEFT configuration on the whole model: what is adapted, wrapped and tied, before any weight exists."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.base import Adapter
from hf_gpipe.adapters.peft import PeftAdapter, Wrapped, before_injection, need_peft, values_where_they_stay
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.torch import parts_of

#: Options of adapters that stages do not support -> why.
_UNSUPPORTED = {
    "layer_replication": "it gives the model other layers than its configuration names",
    "megatron_config": "it is for Megatron's layers",
    "arrow_config": "it routes each token among several adapters",
    "alora_invocation_tokens": "adapters would be turned on by the tokens before them",
    "velora_config": "its layers keep a projection of the first rows that they see, which would depend on the stages",
    "monteclora_config": "its layers draw noise, which would depend on the stages",
    "use_bdlora": "it divides the adapters among devices",
}

#: Methods of PEFT's model of adapters, where it has its own -> what it does there that no stage would do.
_OF_WHOLE_MODELS = {
    ("forward", "generate"): "its model computes more than its layers do, such as another term of the loss",
    ("update_and_allocate",): "its model changes the layers between two updates, by the gradients of all of them",
}

#: Values of `init_lora_weights` that decompose the weights, and subtract from them what the adapters begin with.
_DECOMPOSING_STARTS = re.compile(r"(?i:olora)|pissa(_niter_\d+)?|loftq")


def resolve_peft(adapter: Adapter, name: str, config: Any, *, is_new: bool = True) -> None:
    """Let PEFT resolve its configuration on the whole model, on the meta device.

    Args:
        adapter: the model's adapter, whose `peft` is set; where its head gets adapters, its `projection` changes.
        name: the name of the PEFT adapter.
        config: the configuration of the PEFT adapter.
        is_new: whether the layers of the PEFT adapter are yet to be added.

    Raises:
        UserError: peft is not installed.
        UnsupportedModelError: the method, its targets or its initial values cannot be split over stages.
    """
    need_peft()
    from peft import inject_adapter_in_model

    family, method = adapter.config.model_type, config.peft_type.value
    if reason := _why_not_held(config):
        raise UnsupportedModelError(
            f"{family}: peft's {method} is not supported: {reason}; use LoRA on linear layers of the blocks"
        )
    for option, reason in _UNSUPPORTED.items():
        if getattr(config, option, None):
            raise UnsupportedModelError(f"{family}: {option} of the adapters is not supported: {reason}; leave it out")
    resolved = copy.deepcopy(config)
    if adapter.task_type is not None and config.task_type == adapter.task_type:
        # The head of a model that classifies rows or tokens is trained too, as PEFT does.
        asked = list(getattr(config, "modules_to_save", None) or ())
        resolved.modules_to_save = [*asked, *(own for own in ("classifier", "score") if own not in asked)]
    whole = adapter.skeleton()
    try:
        with values_where_they_stay(whole):
            inject_adapter_in_model(known := before_injection(resolved), whole, name)
    except NotImplementedError as error:  # an operator does not run on meta tensors
        raise UnsupportedModelError(
            f"{family}: peft's {method} is not supported: it reads the weights while its layers are added, and stages "
            "have none then; use LoRA on linear layers of the blocks"
        ) from error
    # PEFT raises these errors for what it cannot wrap or tie.
    except (ValueError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(f"{family}: peft's {method}: {error}") from error
    resolved.target_modules = known.target_modules
    if hasattr(known, "fan_in_fan_out"):
        resolved.fan_in_fan_out = known.fan_in_fan_out
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    trained = frozenset(path for path, parameter in parameters.items() if parameter.requires_grad)
    ties = _ties(adapter.ties, parameters)
    _check_trained(adapter, trained, ties)
    if getattr(known, "target_modules_to_tie", None):
        raise UnsupportedModelError(
            f"{family}: ensure_weight_tying gives the embedding and the head one LoRA, transposed in one of them; "
            "leave it out, or name the embedding in modules_to_save or trainable_token_indices"
        )
    if is_new:
        _check_start(adapter, resolved, whole, ties)
    saves_embeddings = _saves_embeddings(adapter, resolved, whole)
    adapter.peft = PeftAdapter(name, resolved, _wrapped(whole, name), trained, ties, saves_embeddings)
    adapter.projection = adapter.peft.projection(adapter.projection, whole)


def _why_not_held(config: Any) -> str:
    """Why stages cannot hold adapters of a method, or an empty text: they run layers, and not PEFT's model of them."""
    from hf_gpipe.libraries.peft import PEFT_TYPE_TO_TUNER_MAPPING, BaseTuner, changes_injection

    if config.is_prompt_learning:
        return "prompt learning changes what the model reads, and not its layers"
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    if not issubclass(tuner, BaseTuner):
        return "it puts modules around those of the model"
    for methods, reason in _OF_WHOLE_MODELS.items():
        if any(getattr(tuner, method, None) is not getattr(BaseTuner, method, None) for method in methods):
            return reason
    return "layers of several stages would share its tensors" if changes_injection(tuner) else ""


def _check_trained(adapter: Adapter, trained: frozenset[str], ties: Mapping[str, str]) -> None:
    """Raise UnsupportedModelError where a trained parameter is in no module that the stages call."""
    called = tuple(f"{module}." for layer in adapter.layers for module in layer.modules)
    used = {ties.get(name, name) for name in trained if name.startswith(called)}
    for name in sorted(trained):
        if ties.get(name, name) not in used:
            raise UnsupportedModelError(
                f"{adapter.config.model_type}: PEFT would train {name!r}, which is in none of the modules that text "
                "passes through; leave its module out of target_modules, modules_to_save and trainable_token_indices, "
                "or name it in exclude_modules"
            )


def _ties(ties: Mapping[str, str], parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """The tied parameters of a model with adapters, from those of the plain model: alias -> source."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, []).append(name)
    # A module stands under its own name, whatever is wrapped around it.
    aliases = tuple(f"{alias.rpartition('.')[0]}." for alias in ties)
    tied: dict[str, str] = {}
    for same in names.values():
        source = next((name for name in same if not name.startswith(aliases)), same[0])
        tied |= {name: source for name in same if name != source}
    return tied


def _check_start(adapter: Adapter, config: Any, whole: PreTrainedModel, ties: Mapping[str, str]) -> None:
    """Raise UnsupportedModelError for initial values of new adapters that a stage cannot compute from its weights."""
    start = getattr(config, "init_lora_weights", True)
    if not isinstance(start, str) or start.lower() == "gaussian":
        return
    family, advice = adapter.config.model_type, "use True or 'gaussian'"
    if _DECOMPOSING_STARTS.fullmatch(start) is None:
        raise UnsupportedModelError(
            f"{family}: init_lora_weights={start!r} is not supported; let peft.get_peft_model make the adapters and "
            f"give that model, or use True, 'gaussian', 'pissa', 'pissa_niter_4', 'olora' or 'loftq'"
        )
    if adapter.quantisation is not None or adapter.dtype == torch.float64:
        what = "quantised" if adapter.quantisation is not None else "float64"
        raise UnsupportedModelError(
            f"{family}: init_lora_weights={start!r} decomposes weights of float32, bfloat16 or float16, and the "
            f"model's are {what}; {advice}"
        )
    tied = {*ties, *ties.values()}
    for name, module in whole.named_modules():
        if len(getattr(module, "lora_A", ())) and any(f"{name}.{own}" in tied for own, _ in module.named_parameters()):
            raise UnsupportedModelError(
                f"{family}: init_lora_weights={start!r} changes the weights of its targets, and those of {name!r} are "
                f"also used elsewhere; leave {name!r} out of target_modules, or {advice}"
            )


def _wrapped(whole: PreTrainedModel, name: str) -> tuple[Wrapped, ...]:
    """The modules of a model with adapters that PEFT has wrapped whole; those that others are tied to come first."""
    from hf_gpipe.libraries.peft import AuxiliaryTrainingWrapper

    wrapped: list[Wrapped] = []
    trained: dict[nn.Parameter, str] = {}
    wrappers: dict[str, Any] = {n: m for n, m in whole.named_modules() if isinstance(m, AuxiliaryTrainingWrapper)}
    adapters: dict[str, Any] = {path: parts_of(wrapper).get("token_adapter") for path, wrapper in wrappers.items()}
    for path in sorted(wrappers, key=lambda module: getattr(adapters[module], "tied_adapter", None) is not None):
        wrapper, adapter = wrappers[path], adapters[path]
        tokens = None if adapter is None else tuple(adapter.token_indices[name])
        own = (wrapper.modules_to_save if adapter is None else adapter.trainable_tokens_delta).parameters()
        sources = {trained.setdefault(parameter, path) for parameter in own} - {path}
        wrapped.append(Wrapped(path, tokens, next(iter(sources), None)))
    return tuple(wrapped)


def _saves_embeddings(adapter: Adapter, config: Any, whole: PreTrainedModel) -> bool:
    """Whether PEFT would save the embeddings and the head with the adapters; see `PeftAdapter`."""
    if not adapter.stacks:  # images have no vocabulary
        return False
    if config.peft_type.value != "TRAINABLE_TOKENS" and getattr(config, "trainable_token_indices", None) is None:
        # PEFT knows them by these names alone: with GPT-2's "wte" as a target it saves no embeddings.
        from hf_gpipe.libraries.peft import EMBEDDING_LAYER_NAMES

        targets: Any = getattr(config, "target_modules", None) or ()
        if isinstance(targets, str):
            paths = [path for path, _ in whole.named_modules() if re.fullmatch(targets, path)]
            targets = {path.rpartition(".")[2] for path in paths}
        if any(name in targets for name in EMBEDDING_LAYER_NAMES):
            return True
    base = adapter.given_config.name_or_path
    if not base:
        return False
    try:
        saved = type(adapter.config).from_pretrained(base, local_files_only=True)
    except (OSError, ValueError):
        return False  # PEFT assumes so too
    return bool(saved.get_text_config().vocab_size != adapter.config.get_text_config().vocab_size)
