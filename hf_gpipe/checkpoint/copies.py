"""Copies of tensors on the CPU, as files are written from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def on_cpu(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """The same values in contiguous tensors on the CPU; those that are there and contiguous already are not copied.

    From CUDA all copies go into pinned memory, which torch keeps for the next save, and the host waits once per device.
    """
    # With non_blocking the memory of the copy is pinned.
    copies = {key: tensor.detach().contiguous().to("cpu", non_blocking=True) for key, tensor in tensors.items()}
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
