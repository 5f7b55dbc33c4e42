"""Dropout between divided layers that draws the masks of any number of ranks: the whole mask, of which each has a part.

All ranks draw the same numbers, those of one rank without a division. So a run does not depend on T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hf_gpipe.errors import UserError
from hf_gpipe.modes.tensor_parallel.region import Region


class WholeMasks(TorchFunctionMode):
    """Context manager in a block's forward: `dropout` inside of the divided part draws the mask of all ranks."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            raise UserError(
                "the dropout of attention probabilities is drawn inside of sdpa, where its mask cannot be divided; use "
                "attn_implementation eager, set that dropout to 0"
            )
        if func is not F.dropout or not self._region.is_inside:
            return func(*args, **kwargs)
        return self._dropout(*args, **kwargs)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """`F.dropout` of a tensor (B, heads, T, S) with a part of the heads, or (..., features) with a part of them."""
        if not (training and p):
            return input
        place, units = self._region.ranks.place, self._region.units
        dim = 1 if input.dim() == 4 else -1
        shape, width = list(input.shape), input.shape[dim] // units[place]
        shape[dim] = width * sum(units)
        mask = F.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), p)
        return input * mask.split([width * unit for unit in units], dim)[place]
