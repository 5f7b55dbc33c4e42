"""Where a block's forward is: between a column layer and the row layer after it, tensors are parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_gpipe.adapters.tensor_parallel.ranks import Ranks, enter, leave


class Region:
    """The divided part of the blocks of a stage.

    A block begins outside of it, also when it runs again in backward (split.py); nothing else depends on what ran
    before.

    Attributes:
        ranks: of the worker.
        is_inside: whether the tensors at hand are parts.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        """Begin outside."""
        self.is_inside = False
        self._entered = WeakIdKeyDictionary()

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a column layer reads. Layers that read the same tensor share its gradient's sum."""
        self.is_inside = True
        if tensor not in self._entered:
            self._entered[tensor] = enter(tensor, self.ranks)
        entered: torch.Tensor = self._entered[tensor]
        return entered

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what the row layers of all ranks make."""
        self.reset()
        return leave(tensor, self.ranks)

    @contextmanager
    def being(self, *, inside: bool) -> Iterator[None]:
        """Context manager in which the tensors at hand are parts, or whole."""
        before, self.is_inside = self.is_inside, inside
        try:
            yield
        finally:
            self.is_inside = before
