"""Copies of tensors in CPU memory, as files are written from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def on_cpu(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Put the values into contiguous tensors on the CPU. A tensor that is one already is not copied.

    From CUDA all copies go into pinned memory, which torch keeps for the next save, and the host waits once per device.
    """
    return _ready(tensors, {key: t.detach().contiguous().to("cpu", non_blocking=True) for key, t in tensors.items()})


def copied(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Copies on the CPU, from CUDA in pinned memory, which stay as they are when the tensors change."""
    copies = {key: t.detach().to("cpu", non_blocking=True, copy=True) for key, t in tensors.items()}
    return _ready(tensors, copies)


def _ready(tensors: Mapping[Key, torch.Tensor], copies: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """Wait until the copies, which `non_blocking` has in pinned memory, have their values."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
