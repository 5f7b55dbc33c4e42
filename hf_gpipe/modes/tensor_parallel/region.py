"""The divided part of a block's forward: between a column layer and the row layer after it, tensors are parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_gpipe.adapters.modules.weight_gradients import DuringSums
from hf_gpipe.adapters.parts.ranks import Ranks, enter, leave
from hf_gpipe.libraries.torch import WeakIdKeyDictionary


class Region:
    """The divided part of the blocks of a stage.

    A block begins outside of it, also when it runs again in backward (split.py); nothing else depends on what ran
    before. torch.compile cannot compile what the ranks exchange, and is not to try it function by function.

    Attributes:
        ranks: the ranks of the worker.
        is_inside: whether the tensors at hand are parts.
        units: the number of heads or columns of these tensors on each rank.
        during_sums: products of column layers that are added up while the gradient of their input is summed; None:
            autograd computes them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.units: tuple[int, ...] = (1,) * ranks.size
        self.during_sums: DuringSums | None = None
        self.reset()

    @torch.compiler.disable
    def reset(self) -> None:
        """Begin outside."""
        self.is_inside = False
        self._entered = WeakIdKeyDictionary()

    @torch.compiler.disable
    def enter(self, tensor: torch.Tensor, units: tuple[int, ...] | None) -> torch.Tensor:
        """The tensor that a column layer reads, which makes so many units. Layers that read the same tensor share its
        gradient's sum."""
        self.is_inside = True
        self.units = units or self.units
        if tensor not in self._entered:
            self._entered[tensor] = enter(tensor, self.ranks, self._meanwhile)
        entered: torch.Tensor = self._entered[tensor]
        return entered

    def _meanwhile(self) -> None:
        if self.during_sums is not None:
            self.during_sums.pass_on()

    @torch.compiler.disable
    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what the row layers of all ranks make."""
        self.reset()
        return leave(tensor, self.ranks)

    @contextmanager
    def being(self, units: tuple[int, ...] | None) -> Iterator[None]:
        """Context manager in which the tensors at hand are parts of so many units, or whole."""
        before = self.is_inside, self.units
        self.is_inside, self.units = units is not None, units or self.units
        try:
            yield
        finally:
            self.is_inside, self.units = before
