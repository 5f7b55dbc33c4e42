"""The optimizer's state on a disk, for models whose state is larger than the CPU memory.

The tensors of the state are memory-mapped files, so the optimizer and checkpoints use them as any others, and the
kernel's page cache is the buffer: it reads the pages that an update needs, and writes changed pages back.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_gpipe.errors import UserError
from hf_gpipe.runtime.memory import aligned, path_of, reserved_file
from hf_gpipe.runtime.shards import name_of
from hf_gpipe.text import size_text

SETTING = "optimizer_state_dir"
#: The optimizers whose state of a parameter is zeros before its first update.
_BEGIN_WITH_ZEROS = [f"torch.{name}" for name in ("Adadelta", "Adam", "Adamax", "AdamW", "RAdam", "RMSprop")]
#: The shape of a parameter that shows which tensors an optimizer keeps of each element.
_TINY = (2,)


def zeros_on_disk(folder: str, likes: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Zeros in a new file, whose room on the disk is reserved.

    Args:
        folder: where the file is.
        likes: tensors with the shapes, strides and types of the zeros.
        what: words for what these are.

    Raises:
        UserError: the file cannot be made, or the disk has no room.
    """
    sizes = [aligned(like.numel() * like.itemsize) for like in likes]
    if not (size := sum(sizes)):
        return [torch.zeros_like(like, device="cpu") for like in likes]
    if sys.platform != "linux":
        raise UserError(f"{SETTING} is given, and files are reserved and mapped on Linux alone; leave the folder out")
    try:
        with reserved_file(Path(folder), size) as file:
            memory = torch.from_file(path_of(file), shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise UserError(
            f"{SETTING}: {folder} cannot hold the {size_text(size)} of {what} of this process ({error.strerror}); give "
            "a folder that can be written to, on a disk with more room"
        ) from error
    pieces = memory.split(sizes)
    return [
        piece.view(like.dtype).as_strided(like.shape, like.stride()) for piece, like in zip(pieces, likes, strict=True)
    ]


class DiskState:
    """The state of an optimizer's parameters in CPU memory, which is on a disk from now on.

    Args:
        optimizer: the optimizer.
        folder: where the files are.
        updated: what it updates: parameter -> the values whose state it keeps, all of the parameter or a shard of it.

    Raises:
        UserError: the optimizer or its parameters have no such state, or the disk has no room.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, folder: str, updated: Mapping[torch.nn.Parameter, torch.Tensor]
    ) -> None:
        if name_of(optimizer) not in _BEGIN_WITH_ZEROS:
            known = ", ".join(_BEGIN_WITH_ZEROS)
            raise UserError(
                f"{SETTING} is given and the optimizer is {name_of(optimizer)}, whose state does not begin with zeros; "
                f"use one of {known}, such as optim=adamw_torch_fused, or leave the folder out"
            )
        if updated and not any(values.device.type == "cpu" for values in updated.values()):
            device = next(iter(updated.values())).device
            raise UserError(
                f"{SETTING} is given and the optimizer's state is on {device}; set offload_optimizer, or "
                "offload_weights to all, or leave the folder out"
            )
        self.optimizer = optimizer
        #: What the optimizer keeps of each parameter: tensors on the disk, and small values as they begin.
        self._places: dict[torch.nn.Parameter, dict[str, Any]] = {}
        likes: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (own := updated.get(parameter)) is None or own.device.type != "cpu":
                    continue
                slots = self._places[parameter] = _first_state(optimizer, group, parameter.dtype)
                for slot, value in slots.items():
                    if value.shape == _TINY:
                        slots[slot] = torch.empty_like(own, dtype=value.dtype, device="meta")
                        likes.append(slots[slot])
        on_disk = iter(zeros_on_disk(folder, likes, "the optimizer's state"))
        for slots in self._places.values():
            slots |= {slot: next(on_disk) for slot, value in slots.items() if value.device.type == "meta"}
        self._take(is_new=True)
        optimizer.register_load_state_dict_post_hook(lambda _: self._take())

    def _take(self, *, is_new: bool = False) -> None:
        """Move the optimizer's present state to the disk, zeros where it has none."""
        for parameter, places in self._places.items():
            slots = self.optimizer.state[parameter]
            for slot, place in places.items():
                if place.dim() == 0:
                    slots.setdefault(slot, place.clone())
                    continue
                if slot in slots:
                    place.copy_(slots[slot])
                elif not is_new:
                    place.zero_()
                slots[slot] = place


def _first_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The state of a tiny parameter before its first update: zeros, as the optimizer would make them."""
    tiny = torch.nn.Parameter(torch.zeros(_TINY, dtype=dtype))
    tiny.grad = torch.zeros_like(tiny)
    cls: type[Any] = type(optimizer)
    made = cls([{**group, "params": [tiny]}])
    made.step()
    return {slot: torch.zeros_like(value) for slot, value in made.state[tiny].items()}
