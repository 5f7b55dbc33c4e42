"""The model of one stage, with its weights and ready to run, for all that runs one: training, the planner, checks."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.checkpoint import stage_weights
from hf_gpipe.libraries.torch import FakeTensorMode

Weights: TypeAlias = nn.Module | str | os.PathLike[str] | FakeTensorMode | None
"""A model in memory, which shares its weights; a Hub id or directory to read; None: they are initialised. With a mode
of fake tensors there are none: PyTorch passes shapes and types along and computes nothing."""


def assemble(
    adapter: Adapter,
    layers: range,
    weights: Weights,
    device: torch.device,
    seed: int = 0,
    *,
    maps_files: bool = False,
    ranks: Ranks | None = None,
) -> StageModel:
    """The model of a stage, with its weights and with the layers of the model's PEFT adapter.

    Args:
        adapter: of the model.
        layers: the numbers of its layers, which are consecutive.
        weights: where they come from.
        device: where they go.
        seed: of those that are initialised.
        maps_files: whether weights that are read are the mapped files on the CPU, which take no memory until they are
            used.
        ranks: among which its layers are divided; None: they are whole.
    """
    stage = StageModel(adapter, layers.start, layers.stop)
    if isinstance(weights, FakeTensorMode):
        adapter.lay_out(stage.model)
        with weights, torch.device(device):
            _materialise(stage, device)
            if ranks is not None:
                stage.divide(ranks)
            stage.seal(device)
        return stage
    peft = adapter.peft
    has_peft_layers = bool(getattr(weights, "peft_config", None))
    if isinstance(weights, nn.Module):
        if peft is not None and has_peft_layers:
            peft.inject(stage.model)
        stage_weights.take(stage, weights, device)
    elif weights is None and not isinstance(stage.model, PreTrainedModel):
        # To be timed alone: which values a module begins with is its own affair.
        with torch.device(device), torch.no_grad():
            _materialise(stage, device)
            for parameter in stage.model.parameters():
                parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
    elif weights is None:
        stage_weights.initialise(stage, device, seed)
    else:
        stage_weights.load(stage, weights, device, seed, maps_files=maps_files or ranks is not None)
    if peft is not None and not has_peft_layers:
        stage_weights.add_peft(stage, peft, device, seed)
    if ranks is not None:
        stage.divide(ranks)
        if isinstance(weights, str | os.PathLike) and not maps_files:
            stage_weights.leave_files(stage, device)
    stage.seal(device)
    return stage


def _materialise(stage: StageModel, device: torch.device) -> None:
    """Give the stage's tensors memory of torch's default device without any values; ties stay ties."""
    memory: dict[torch.Tensor, torch.Tensor] = {}
    for module in stage.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in memory:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                memory[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, memory[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    if stage.adapter.quantisation is not None:
        stage.adapter.quantisation.lay_out(stage.model, device)
