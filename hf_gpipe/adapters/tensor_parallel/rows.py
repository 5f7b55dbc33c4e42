"""Between divided layers each rank has a part of the positions: sequence parallelism.

Norms, dropout and the sums of residuals treat each position alone, so what they keep for backward is divided too, and
only what enters the divided layers is whole: it is gathered from the ranks, and what leaves them is summed to parts
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). A sum to parts and a gathering send together what one sum
does. A block begins with whole hidden states and ends with them, so nothing outside of it knows of parts. That is
another gathering in its forward; in backward the next block's gradient comes in parts. What was gathered for the
divided layers is not kept: backward gathers it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_gpipe.adapters.tensor_parallel.cuts import dealt, lengths
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks

DIM = 1
"""The positions of hidden states (B, T, D)."""


class Rows:
    """How the positions of the hidden states at hand are divided.

    Args:
        length: T.
        ranks: that have a part each.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        self.length, self.ranks = length, ranks
        runs = dealt(length, ranks.size)
        self.lengths, (self._first, stop) = lengths(runs), runs[ranks.place]
        self._own = stop - self._first

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        return whole.narrow(DIM, self._first, self._own).clone(memory_format=torch.contiguous_format)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The whole."""
        return self.ranks.gathered(part, DIM, self.lengths)

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum a whole tensor over the ranks; the function that is returned gives this rank's part."""
        return self.ranks.begin_total_part(tensor, DIM, self.lengths)

    def divide(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of hidden states that are the same on every rank."""
        part: torch.Tensor = _Divide.apply(whole, self)
        return part

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Whole hidden states, which all ranks go on to use alike."""
        whole: torch.Tensor = _Join.apply(part, self)
        return whole

    def enter(self, part: torch.Tensor, meanwhile: Callable[[], None]) -> torch.Tensor:
        """Whole hidden states, of which each rank makes something else; `meanwhile` as of `ranks.enter`."""
        whole: torch.Tensor = _EnterWhole.apply(part, self, meanwhile)
        return whole

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of what all ranks made."""
        part: torch.Tensor = _LeaveInParts.apply(tensor, self)
        return part


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.own(whole)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.gathered(outer), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gathered(part)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.own(outer), None


class _EnterWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, rows: Rows, meanwhile: Callable[[], None]) -> torch.Tensor:
        ctx.of = rows, meanwhile
        return rows.gathered(part)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, meanwhile = ctx.of
        total = rows.begin_total(outer)
        meanwhile()
        return total(), None, None


class _LeaveInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.begin_total(tensor)()

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.gathered(outer), None
