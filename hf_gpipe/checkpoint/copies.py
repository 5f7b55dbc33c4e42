"""Copies of tensors in host memory, as files are written from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from hf_gpipe.checkpoint.digests import Entry

Key = TypeVar("Key")
Files: TypeAlias = dict[int, dict[str, torch.Tensor]]
"""The tensors of each stage's file, by name."""


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


@dataclass
class PendingWrite:
    """Tensors of a training that are to be written, and the function that writes them.

    Whatever else is written, such as configurations, is settled when this object is made. Without `copy` the tensors
    are those of the training, which must not go on before `write`.

    Attributes:
        files: the tensors.
        writer: writes them, and is the last to use them; every process must call it.
    """

    files: Files
    writer: Callable[[Files], dict[str, Entry]]

    @property
    def num_bytes(self) -> int:
        """Size of the copies that `copy` makes."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())

    def copy(self) -> None:
        """Replace the tensors by copies, so that the training can go on."""
        self.files = {stage: copied(tensors) for stage, tensors in self.files.items()}

    def write(self) -> dict[str, Entry]:
        """Write the files. Every process must call it.

        Returns:
            The digests of the files that `writer` has not put into the directory's digests itself.

        Raises:
            CheckpointError: on every process, if one of them cannot write.
        """
        files, self.files = self.files, {}
        return self.writer(files)
