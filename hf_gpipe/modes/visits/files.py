"""Weights that visit from the files of a checkpoint, which need no CPU memory of their own."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from safetensors import safe_open
from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.checkpoint.weight_files import weight_files


def mapped_weights(
    model: StageModel, path: str | os.PathLike[str], parameters: Collection[nn.Parameter]
) -> dict[nn.Parameter, torch.Tensor]:
    """The mapped tensors of a checkpoint that some parameters of a stage have the values of, without any conversion.

    Raises:
        CheckpointError: as `weight_files`.
    """
    wanted = {*parameters}
    # Without the module that peft puts around a layer.
    named = ((name.replace(".base_layer.", "."), parameter) for name, parameter in model.parameters.items())
    names = {name: parameter for name, parameter in named if parameter in wanted}
    mapped: dict[nn.Parameter, torch.Tensor] = {}
    for file in weight_files(path, names.__contains__):
        with safe_open(file, framework="pt") as opened:
            for name in names.keys() & set(opened.keys()):
                tensor, parameter = opened.get_tensor(name), names[name]
                is_like = tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
                if is_like and torch.equal(tensor, parameter.data.cpu()):
                    mapped[parameter] = tensor
    return mapped
