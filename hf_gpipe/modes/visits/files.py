"""Weights that visit from the files of a checkpoint, which need no CPU memory of their own."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.checkpoint.weight_files import mapped_tensors, weight_files


def mapped_weights(
    model: StageModel, path: str | os.PathLike[str], parameters: Collection[nn.Parameter]
) -> dict[nn.Parameter, torch.Tensor]:
    """The mapped tensors of a checkpoint that some parameters of a stage have the values of, without any conversion.

    Raises:
        CheckpointError: the files cannot be read.
    """
    wanted = {*parameters}
    # Without the module that peft puts around a layer.
    named = ((name.replace(".base_layer.", "."), parameter) for name, parameter in model.parameters.items())
    names = {name: parameter for name, parameter in named if parameter in wanted}
    found = mapped_tensors(path, weight_files(path, names.__contains__), names)
    return {names[name]: tensor for name, tensor in found.items() if _is_equal(tensor, names[name])}


def _is_equal(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    is_like = tensor.shape == parameter.shape and tensor.dtype == parameter.dtype
    return is_like and torch.equal(tensor, parameter.data.cpu())
