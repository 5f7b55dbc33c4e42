"""From the user's model to the stages of a process: configuration, adapter, weights and needed gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from hf_gpipe import strict_json
from hf_gpipe.adapters import Adapter, StageModel, adapter_for, is_known_exact
from hf_gpipe.adapters.autocast import Autocast
from hf_gpipe.adapters.classifiers import classifier_of
from hf_gpipe.adapters.feed_forward import divide_by_depth, feed_forward_outputs
from hf_gpipe.adapters.guards import check_as_configured, check_classes, check_model, check_sizes
from hf_gpipe.adapters.head import FoundProjection
from hf_gpipe.adapters.patches import Patch, find_patches
from hf_gpipe.adapters.peft import PeftAdapter, find_peft
from hf_gpipe.adapters.peft_resolve import make_peft
from hf_gpipe.checkpoint import hub
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.source_digest import digest_of_model
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.model.exactness import verify
from hf_gpipe.runtime.agreement import Noted, model_in_memory
from hf_gpipe.runtime.loss import Loss
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.world import World

ModelSource: TypeAlias = PreTrainedModel | PreTrainedConfig | str | os.PathLike[str]
"""A model in memory, a configuration to initialise, or a Hub id or directory to load."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def compared_source(model: Any) -> dict[str, Any]:
    """What must be the same in all processes of the model that each was given (runtime/agreement.py).

    Raises CheckpointError where the files of a directory cannot be read.
    """
    if isinstance(model, PreTrainedModel | PreTrainedConfig):
        return model_in_memory(model)
    if isinstance(model, str | os.PathLike) and Path(model).is_dir():
        # Each machine may have it at a path of its own.
        return {"the digest of the model's files": Noted(digest_of_model(Path(model)), os.fspath(model))}
    return {"the model": model}


@dataclass(frozen=True)
class Source:
    """The source of a model's weights, and its adapter, known before any weight is read.

    Attributes:
        model: without its PEFT wrapper, if it had one; None once the stages are made, so that no process keeps
            the weights of other processes' stages.
        adapter: the model's layers.
        peft: the PEFT adapters to train with.
        has_peft_layers: whether the model in memory has their layers already.
        depth_scaled_feed_forward: whether the feed-forward layers of a new model start smaller in a deeper one.
        patches: the functions on modules of the model in memory that its stages run in place of the library's.
    """

    model: ModelSource | None
    adapter: Adapter
    peft: PeftAdapter | None
    has_peft_layers: bool
    depth_scaled_feed_forward: bool = False
    patches: tuple[Patch, ...] = ()

    @property
    def has_new_weights(self) -> bool:
        """Whether some weights are initialised here: the whole model's, those of adapters, or a classifier's head."""
        has_new_adapters = self.peft is not None and not self.has_peft_layers
        return isinstance(self.model, PreTrainedConfig) or has_new_adapters or self.adapter.may_lack_head

    @classmethod
    def open(
        cls,
        model: ModelSource,
        *,
        dtype: torch.dtype | str | None,
        attn_implementation: str | None,
        trust_remote_code: bool,
        config_overrides: Mapping[str, Any] | None,
        peft_config: Any,
        autocast: Autocast | None = None,
        depth_scaled_feed_forward: bool = False,
        quantization_config: Any = None,
    ) -> Source:
        """Read and check a model, without its weights. The arguments are those of `Pipeline`.

        Raises UserError for a model that cannot be split exactly, or that differs from its configuration.
        """
        weights = _read_dtype(dtype, "dtype")
        model, peft_request = find_peft(model, peft_config)
        check_model(model)
        if config_overrides and not isinstance(model, str | os.PathLike):
            raise UserError("config_overrides go with a Hub id or directory; change the configuration that you give")
        if depth_scaled_feed_forward and not isinstance(model, PreTrainedConfig):
            raise UserError(
                "depth_scaled_feed_forward is for a new model, and this one has its weights; leave it out, or give a "
                "configuration"
            )
        if depth_scaled_feed_forward and quantization_config is not None:
            raise UserError(
                "depth_scaled_feed_forward and quantization_config exclude each other; leave one of them out"
            )
        if isinstance(model, PreTrainedModel) and quantization_config is not None:
            raise UserError(
                "quantization_config is for weights that are read; give the model's Hub id or directory, or load the "
                "model with quantization_config in from_pretrained"
            )
        config = _config_of(model, trust_remote_code, config_overrides)
        model_class = None
        if isinstance(model, PreTrainedModel):
            if weights not in (None, model.dtype):
                raise UserError(f"dtype={weights}: the given model is {model.dtype}; convert it before, with model.to")
            weights, model_class = model.dtype, type(model)
            attn_implementation = attn_implementation or config._attn_implementation
        else:
            model_class = classifier_of(config)
        weights = weights or _read_dtype(getattr(config, "dtype", None), "the configuration's dtype") or torch.float32
        adapter = adapter_for(
            config,
            weights,
            attn_implementation,
            model_class,
            trust_remote_code=trust_remote_code,
            autocast=autocast,
            quantization_config=quantization_config,
        )
        # A language model's checkpoint, read as a classifier.
        adapter.may_lack_head = adapter.is_classifier and "architectures" in (config_overrides or {})
        layers = tuple(name for layer in adapter.layers for name in layer.all_modules)
        check_classes(adapter.reference, layers)
        if depth_scaled_feed_forward:
            feed_forward_outputs(adapter)  # raises its error before any weight is made
        if not is_known_exact(adapter):
            verify(config, adapter.compared_class, trust_remote_code=trust_remote_code, adapter=adapter)
        if (generation_config := _generation_config_of(model)) is not None:
            adapter.reference.generation_config = generation_config
        has_peft_layers = bool(getattr(model, "peft_config", None))
        peft = None if peft_request is None else make_peft(adapter, *peft_request, is_new=not has_peft_layers)
        source = cls(
            model,
            adapter,
            peft,
            has_peft_layers=has_peft_layers,
            depth_scaled_feed_forward=depth_scaled_feed_forward,
        )
        if isinstance(model, PreTrainedModel):
            expected = adapter.reference
            if peft is not None and source.has_peft_layers:
                expected = adapter.skeleton()
                peft.inject(expected)
            check_as_configured(model, expected)
            source = replace(source, patches=find_patches(model, expected, layers))
            if any(patch.layer == adapter.layers[-1].name for patch in source.patches):
                adapter.projection = FoundProjection((), "a function of its head was replaced")
        return source

    def stage_model(self, layers: range, device: torch.device, seed: int) -> StageModel:
        """Make a stage's model from consecutive layers, with its weights in memory.

        Args:
            layers: their numbers.
            device: where the weights go.
            seed: of initial weights.
        """
        source = self.model
        stage_model = StageModel(self.adapter, layers[0], layers[-1] + 1)
        if isinstance(source, PreTrainedModel):
            if self.peft is not None and self.has_peft_layers:
                self.peft.inject(stage_model.model)
            hub.take(stage_model, source, device)
            for patch in self.patches:
                if any(patch.layer in layer.all_modules for layer in stage_model.layers):
                    patch.put(stage_model.model, source)
        elif isinstance(source, str | os.PathLike):
            hub.load(stage_model, source, device, seed)
        else:
            hub.initialise(stage_model, device, seed)
            if self.depth_scaled_feed_forward:
                divide_by_depth(stage_model)
        if self.peft is not None and not self.has_peft_layers:
            hub.add_peft(stage_model, self.peft, device, seed)
        stage_model.seal(device)
        return stage_model


def make_stages(
    models: Mapping[int, StageModel], adapter: Adapter, is_trained: Sequence[bool], loss: Loss
) -> dict[int, Stage]:
    """Make this process's stages; `is_trained`, of each layer, decides which gradients are sent."""
    return {
        number: Stage(one, lambda boundary: adapter.wants_gradient(boundary, is_trained), loss)
        for number, one in models.items()
    }


def boundary_dtype(name: str | None, adapter: Adapter) -> torch.dtype | None:
    """The type that `boundary_dtype` names. Raises UserError unless it is narrower than the model's."""
    dtype = _read_dtype(name, "boundary_dtype")
    if dtype is not None and dtype.itemsize >= adapter.dtype.itemsize:
        raise UserError(
            f"boundary_dtype is {name} and the model's type is {str(adapter.dtype).removeprefix('torch.')}, which "
            "is not wider: nothing would be sent in fewer bytes; name a narrower type, or leave boundary_dtype out"
        )
    return dtype


@dataclass(frozen=True)
class Trained:
    """What is trained, by `requires_grad` when the stages are made: which gradients are sent depends on it.

    Attributes:
        layers: whether each layer of the whole model is trained.
        own: by name, whether each parameter of this process is.
        parameters: by name, whether each parameter of the whole model is.
    """

    layers: Sequence[bool]
    own: Mapping[str, bool]
    parameters: Mapping[str, bool]

    @classmethod
    def of(cls, models: Mapping[int, StageModel], adapter: Adapter, world: World) -> Trained:
        """Every process must call it, with its own stages."""
        own = {name: p.requires_grad for model in models.values() for name, p in model.parameters.items()}
        parameters: dict[str, bool] = {}
        for part in world.gather_objects(own):
            parameters.update(part)
        return cls(trained_layers(models, adapter, world), own, parameters)

    def check(self, models: Mapping[int, StageModel], peft: PeftAdapter | None) -> None:
        """Raise UserError if a `requires_grad` has changed since, or nothing or a quantised model is trained."""
        if peft is None and next(iter(models.values())).adapter.quantisation is not None:
            raise UserError(
                "the model's weights are quantised and cannot be trained; train adapters on them: give the Pipeline "
                "peft_config=LoraConfig(...), or a recipe lora.r (eval_step and generate need none)"
            )
        for model in models.values():
            for name, parameter in model.parameters.items():
                if parameter.requires_grad != self.own[name]:
                    raise UserError(
                        f"{name}: requires_grad was {self.own[name]} when the Pipeline was made and is "
                        f"{parameter.requires_grad} now; freeze or unfreeze parameters first, and make a new one"
                    )
        if not any(self.layers):
            raise UserError(
                "no parameter that the loss depends on has requires_grad=True, so there is nothing to train; unfreeze "
                "some of them, and make a new Pipeline (eval_step and generate need none)"
            )


def trained_layers(models: Mapping[int, StageModel], adapter: Adapter, world: World) -> list[bool]:
    """Whether each layer of the whole model is trained, the same in every process. Every process must call it."""
    local = {
        index: adapter.is_trained(layer, stage_model.model)
        for stage_model in models.values()
        for index, layer in enumerate(stage_model.layers, stage_model.start)
    }
    is_trained: dict[int, bool] = {}
    for part in world.gather_objects(local):
        is_trained.update(part)
    return [is_trained[index] for index in range(len(adapter.layers))]


def _read_dtype(given: Any, what: str) -> torch.dtype | None:
    """The type of the weights, given as a type or its name; None for the model's own."""
    if given is None or given == "auto":
        return None
    dtype = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if dtype not in _DTYPES:
        names = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        raise UserError(f"{what} is {given!r}; expected one of {names}, or 'auto' for the model's own")
    return dtype


def _config_of(model: ModelSource, trust_remote_code: bool, overrides: Mapping[str, Any] | None) -> PreTrainedConfig:
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    return read_config(model, trust_remote_code=trust_remote_code, overrides=overrides)


def _generation_config_of(model: ModelSource) -> GenerationConfig | None:
    """The generation configuration that comes with the model; None: transformers derives it."""
    if isinstance(model, PreTrainedModel):
        return copy.deepcopy(getattr(model, "generation_config", None))
    if isinstance(model, PreTrainedConfig):
        return None
    file = Path(model) / GENERATION_CONFIG_NAME
    if file.exists():
        check_sizes(strict_json.read(file, dict[str, Any], allows_nan=True), f"{file}: ")
    try:
        return GenerationConfig.from_pretrained(str(model))
    except OSError:
        return None
    except Exception as error:  # the library raises whatever its reading comes upon
        raise CheckpointError(f"cannot read {file}: {error}") from error
