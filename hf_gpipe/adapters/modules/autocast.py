"""Mixed precision: the operations that torch.autocast chooses compute in half precision; weights keep their type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hf_gpipe.errors import UserError

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Autocast:
    """Mixed precision of a stage's forward (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740).

    Which operations change their type depends on the type of the device, so a model's types are observed on the device
    that it will run on.

    Attributes:
        dtype: bfloat16 or float16.
        device: where the stages compute; any one of several of the same type.

    Raises:
        UserError: `dtype` is another type.
    """

    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        if self.dtype not in HALF_PRECISION:
            raise UserError(f"autocast={self.dtype}: expected torch.bfloat16, torch.float16 or None")


def scope_of(autocast: Autocast | None) -> AbstractContextManager[object]:
    """Context manager in which a forward runs; with None it changes nothing.

    Autocast keeps the weights that it has converted, until the outermost context ends. They lead gradients to the
    weights only where they were converted with a graph, so a forward without one keeps none.
    """
    if autocast is None:
        return nullcontext()
    return torch.autocast(autocast.device.type, autocast.dtype, cache_enabled=torch.is_grad_enabled())


def keeping_weights(autocast: Autocast | None) -> AbstractContextManager[object]:
    """Context manager in which forwards with a graph convert each weight once. No weight may change in it.

    What it keeps is one copy in half precision of each weight that such a forward has converted.
    """
    if autocast is None:
        return nullcontext()
    # Not enabled: only forwards run under autocast. But it is the outermost context, with which the cache ends.
    return torch.autocast(autocast.device.type, autocast.dtype, enabled=False)
