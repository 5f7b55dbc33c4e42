"""The whole model with the tensors that a pipeline trains: `Pipeline.model`.

It is a model of its own class, built on the meta device. The parameters of this process's stages are put into
it and not copied, so they are always current. The parameters of other processes stay on meta. Each parameter is real in
one process, also a tied one.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_gpipe.adapters.modules.autocast import scope_of
from hf_gpipe.adapters.modules.batch_norm import follow_averages
from hf_gpipe.adapters.stage_model import StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.model.stage_parameters import StageParameters

_GIVE = "change the model before it is given to the Pipeline or the trainer"

#: Methods that raise an error, because the pipeline would not notice what they change -> what to do instead.
REFUSED = {
    "push_to_hub": "use push_to_hub of the trainer, or save_pretrained and huggingface_hub",
    "resize_token_embeddings": _GIVE,
    "resize_position_embeddings": _GIVE,
    "gradient_checkpointing_enable": "set recompute, or gradient_checkpointing of the training arguments",
    "gradient_checkpointing_disable": "set recompute",
    "add_adapter": "give peft_config to the Pipeline",
    "load_adapter": "give the Pipeline a model with its adapter",
    "tie_weights": _GIVE,
    "set_input_embeddings": _GIVE,
    "set_output_embeddings": _GIVE,
}


class _Whole:
    """Mixed into the class of the model: sends calls to the pipeline, or raises an error for them."""

    _weights: StageParameters
    #: `generate` and `save_pretrained` of the pipeline.
    _calls: Mapping[str, Callable[..., Any]]
    #: The tensors that `refresh` has inserted, and the names of all parameters.
    _placed: dict[str, nn.Parameter]
    _names: frozenset[str]

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The pipeline's generation configuration: a change also applies to evaluation and is saved."""
        config: GenerationConfig | None = getattr(self._weights.adapter.reference, "generation_config", None)
        return config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        self._weights.adapter.reference.generation_config = config

    @property
    def model_tags(self) -> list[str] | None:
        """The tags of the model's card, which `add_model_tags` adds to; those of a model in memory stay."""
        return getattr(self._weights.adapter.reference, "model_tags", None)

    @model_tags.setter
    def model_tags(self, tags: list[str] | None) -> None:
        self._weights.adapter.reference.model_tags = tags

    @property
    def device(self) -> torch.device:
        """The device of this process's first stage."""
        return next(iter(self._weights.models.values())).device

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Call `Pipeline.generate`; every process must call it."""
        given = {"input_ids": inputs, "generation_config": generation_config}
        return self._calls["generate"](**{name: value for name, value in given.items() if value is not None}, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Call `Pipeline.save_pretrained`; every process must call it."""
        if asked := [name for name, value in options.items() if (name, value) != ("safe_serialization", True)]:
            raise UserError(f"save_pretrained: {asked[0]} is not supported by a pipeline's model; leave it out")
        self._calls["save_pretrained"](save_directory)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Raise UserError where `to`, `half` or a similar method would change a parameter."""
        for name, parameter in self._placed.items():
            with torch.no_grad():
                changes = fn(parameter) is not parameter
            if changes:
                raise UserError(
                    f"the model of a pipeline cannot change its device or type: {name} is {parameter.dtype} on "
                    f"{parameter.device}; {_GIVE}"
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PreTrainedModel:
        """Return a plain model that does not belong to a pipeline."""
        cls = type(self).__bases__[1]
        plain: Any = object.__new__(cls)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name not in _OWN_STATE})
        plain.__dict__.update(generation_config=self.generation_config, model_tags=self.model_tags)
        copied: PreTrainedModel = copy.deepcopy(plain, memo)
        return copied


_OWN_STATE = ("_weights", "_calls", "_placed", "_names", "generation_config")


def whole_model(weights: StageParameters, **calls: Callable[..., Any]) -> PreTrainedModel:
    """The whole model with the tensors of this process's stages; see `Pipeline.model`."""
    adapter = weights.adapter
    model = adapter.skeleton()
    if adapter.peft is not None:
        adapter.peft.inject(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(weights.trainable.parameters[name])
    _place_buffers(model, weights.models)
    follow_averages(model)
    if isinstance(model, PreTrainedModel):
        # The same object, so that a change to it is saved.
        model.config = adapter.reference.config
    cls = type(model)
    methods: dict[str, Any] = {name: _refusal(cls, name) for name in REFUSED if hasattr(cls, name)}
    for name in ("generation_config", "model_tags"):
        model.__dict__.pop(name, None)
    model.__dict__.update(
        _weights=weights,
        _calls=calls,
        _placed={},
        _names=frozenset(n for n, _ in model.named_parameters(remove_duplicate=False)),
    )
    model.__class__ = type(
        cls.__name__, (_Whole, cls), {"__module__": cls.__module__, "forward": _forward_of(cls), **methods}
    )
    refresh(model)
    return model


def refresh(model: PreTrainedModel) -> None:
    """Insert the current tensors of its pipeline into a whole model.

    Raises UserError where a parameter was replaced or added from outside: it would not be trained.
    """
    placed: dict[str, nn.Parameter] = model._placed
    ties, own = model.all_tied_weights_keys, dict(model._weights.named_parameters())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if added := parameters.keys() - model._names:
        raise UserError(f"the model of the pipeline was given a new parameter {min(added)!r}; {_GIVE}")
    for path, parameter in parameters.items():
        if path in placed and placed[path] is not parameter:
            raise UserError(f"{path} of the pipeline's model was replaced and would not be trained; {_GIVE}")
        tensor = own.get(ties.get(path, path))
        if tensor is not None and tensor is not parameter:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, tensor)
            placed[path] = tensor


def _place_buffers(model: PreTrainedModel, stages: Mapping[int, StageModel]) -> None:
    """Insert the stages' buffers into the model; a persistent one from the stage that it belongs to."""
    known: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        real = {name: tensor for name, tensor in stage.model.named_buffers() if not tensor.is_meta}
        known = {**real, **known, **stage.buffers}
    for path, _ in list(model.named_buffers(remove_duplicate=False)):
        if path in known:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, known[path])


def _forward_of(cls: type[PreTrainedModel]) -> Callable[..., Any]:
    """The class's own forward; raises UserError unless one process has the whole model on one device."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._weights.are_in_one_place:
            raise UserError(
                "the layers of this model are on several processes or devices, so it has no forward of its own; use "
                "evaluate or predict of the trainer, eval_step or generate of the Pipeline"
            )
        with scope_of(self._weights.adapter.autocast):
            return cls.forward(self, *args, **kwargs)

    return forward


def _refusal(cls: type[PreTrainedModel], name: str) -> Callable[..., NoReturn]:
    @functools.wraps(getattr(cls, name))
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"{name} is not supported by a pipeline's model; {REFUSED[name]}")

    return refuse
