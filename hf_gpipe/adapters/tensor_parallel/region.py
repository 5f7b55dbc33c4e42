"""The divided part of a block's forward: between a column layer and the row layer after it, tensors are parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_gpipe.adapters.modules.weight_gradients import DuringSums
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks, ending, enter, exchange, leave
from hf_gpipe.adapters.tensor_parallel.rows import DIM, Rows
from hf_gpipe.libraries.torch import WeakIdKeyDictionary, version_of


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
        rows: how positions are divided outside; None: they are not.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.units: tuple[int, ...] = (1,) * ranks.size
        self.during_sums: DuringSums | None = None
        self.rows: Rows | None = None
        #: Whole hidden states that a block joined, with this rank's part of them and their version then.
        self._joined = WeakIdKeyDictionary()
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

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of hidden states that column layers will read. It has entered already."""
        if self.rows is None:
            return tensor
        # Each rank computes something else from it, so backward sums its gradient.
        whole = exchange(tensor, self.rows.gathered, ending(self.rows.begin_total, self._meanwhile))
        self._entered[whole] = whole
        if self.during_sums is not None:
            self.during_sums.save(whole, tensor, self.rows.gathered)
        return whole

    @contextmanager
    def dividing(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Context manager of a block with this rank's part of hidden states (B, T, D)."""
        rows = self.rows = Rows(hidden.shape[DIM], self.ranks)
        part, version = self._joined.get(hidden, (None, 0))
        try:
            is_known = part is not None and version_of(hidden) == version
            yield part if is_known else exchange(hidden, rows.own, rows.gathered)
        finally:
            self.rows = None

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Whole hidden states, at the end of a block; the next one finds the part again."""
        assert self.rows is not None
        whole = exchange(part, self.rows.gathered, self.rows.own)
        self._joined[whole] = part, version_of(whole)
        return whole

    def _meanwhile(self) -> None:
        if self.during_sums is not None:
            self.during_sums.pass_on()

    @torch.compiler.disable
    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of what the row layers of all ranks make, or this rank's part of its positions."""
        self.reset()
        if (rows := self.rows) is None:
            return leave(tensor, self.ranks)
        return exchange(tensor, lambda own: rows.begin_total(own)(), rows.gathered)

    @contextmanager
    def being(self, units: tuple[int, ...] | None) -> Iterator[None]:
        """Context manager in which the tensors at hand are parts of so many units, or whole."""
        before = self.is_inside, self.units
        self.is_inside, self.units = units is not None, units or self.units
        try:
            yield
        finally:
            self.is_inside, self.units = before
