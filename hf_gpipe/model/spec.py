"""The model that a user asks for: its source, and how its weights are read, computed with and trained."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import find_peft
from hf_gpipe.checkpoint.peft import as_config, base_of, has_adapters
from hf_gpipe.checkpoint.source_digest import digest_of_model
from hf_gpipe.job.agreement import Noted, digest_of_tensors

ModelSource: TypeAlias = nn.Module | PreTrainedConfig | str | os.PathLike[str]
"""A model in memory, a configuration to initialise, or a Hub id or directory to load."""


@dataclass(frozen=True)
class ModelSpec:
    """A model as a user asks for it, before anything of it is read: it goes whole to all that makes something of it.

    `ModelSpec.of` makes it from the arguments of `Pipeline`, which say what its fields mean.

    Attributes:
        model: without its PEFT wrapper, if it had one; of a directory of saved adapters, the model that they belong to.
        peft_config: of the PEFT adapter that is trained: the one that is asked for, or that the model in memory has.
        peft_name: the name of that adapter in the model.
        saved_adapters: the directory of the adapters that are trained on, which `peft_config` is of.
    """

    model: ModelSource
    dtype: torch.dtype | str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    config_overrides: Mapping[str, Any] | None = None
    depth_scaled_feed_forward: bool = False
    autocast: torch.dtype | None = None
    quantization_config: Any = None
    peft_config: Any = None
    peft_name: str = "default"
    saved_adapters: str | os.PathLike[str] | None = None

    @classmethod
    def of(cls, model: ModelSource, *, peft_config: Any = None, **options: Any) -> ModelSpec:
        """Raise UserError, or CheckpointError, where the model and `peft_config` do not fit or saved adapters damaged.

        Args:
            model, peft_config: as of `Pipeline`.
            options: other fields.
        """
        if has_adapters(model):
            model, peft_config = base_of(model, peft_config), model
        saved = peft_config if isinstance(peft_config, str | os.PathLike) else None
        model, peft = find_peft(model, as_config(peft_config))
        name, config = peft or (cls.peft_name, None)
        return cls(model, **options, peft_config=config, peft_name=name, saved_adapters=saved)

    @property
    def has_peft_layers(self) -> bool:
        """Whether the model in memory has the layers of its PEFT adapter already."""
        return bool(getattr(self.model, "peft_config", None))

    @property
    def has_new_adapters(self) -> bool:
        """Whether the values of a PEFT adapter are initialised, so that without it the model is the one before."""
        return self.peft_config is not None and not self.has_peft_layers and self.saved_adapters is None

    def makes_weights(self, adapter: Adapter) -> bool:
        """Whether weights are initialised: the whole model's, those of a PEFT adapter, or a classifier's head."""
        makes_head = adapter.may_lack_head and self.saved_adapters is None
        return isinstance(self.model, PreTrainedConfig) or self.has_new_adapters or makes_head

    def compared(self) -> dict[str, Any]:
        """Its values, by name; they must be the same in all processes (job/agreement.py).

        Raises CheckpointError where the files of a directory cannot be read.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        model, saved = values.pop("model"), values.pop("saved_adapters")
        if saved is not None:
            values |= {f"{name}, with adapters": value for name, value in _compared_source(saved).items()}
        return values | _compared_source(model)


def _compared_source(model: Any) -> dict[str, Any]:
    if isinstance(model, nn.Module | PreTrainedConfig):
        return model_in_memory(model)
    if isinstance(model, str | os.PathLike) and Path(model).is_dir():
        # Each machine may have it at a path of its own.
        return {"the digest of the model's files": Noted(digest_of_model(Path(model)), os.fspath(model))}
    return {"the model": model}


def model_in_memory(model: torch.nn.Module | PreTrainedConfig) -> dict[str, Any]:
    """The compared facts of a model or a configuration in memory: each value of its configuration, and its weights."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    facts: dict[str, Any] = {"the model's class": type(model)}
    if isinstance(config, PreTrainedConfig):
        # A name with an underscore says where the configuration comes from.
        facts |= {f"the model's config.{n}": value for n, value in config.to_dict().items() if not n.startswith("_")}
    else:
        facts["the model's modules"] = model
    if isinstance(model, torch.nn.Module):
        tensors = dict(model.named_parameters())
        shapes = {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}
        facts["the shapes of the model's weights"] = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
        facts["the digest of the model's weights"] = digest_of_tensors(tensors)
    return facts
