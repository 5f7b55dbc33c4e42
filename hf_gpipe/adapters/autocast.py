"""Mixed precision: the operations that torch.autocast chooses compute in half precision, weights stay as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from hf_gpipe.errors import UserError

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Autocast:
    """How a stage's forward computes (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740).

    Which operations change their type depends on the kind of device, so a model's types are observed on the device that
    it is to run on.

    Attributes:
        dtype: bfloat16 or float16.
        device: where the stages compute; of several of a kind any one does.

    Raises:
        UserError: another type.
    """

    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        if self.dtype not in HALF_PRECISION:
            raise UserError(f"autocast={self.dtype}: expected torch.bfloat16, torch.float16 or None")

    def scope(self) -> AbstractContextManager[object]:
        """The context in which a forward runs."""
        return torch.autocast(self.device.type, self.dtype)


def scope_of(autocast: Autocast | None) -> AbstractContextManager[object]:
    """`Autocast.scope`, or a context that changes nothing."""
    return nullcontext() if autocast is None else autocast.scope()
