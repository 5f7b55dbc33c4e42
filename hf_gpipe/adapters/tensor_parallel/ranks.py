"""The ranks of a worker, each with a part of every divided layer, and how tensors enter and leave the divided part.

What enters is the same on every rank, and each rank's part of the gradient is summed on the way back. What leaves is
summed, and its gradient is the same on every rank. These are the operators f and g of Megatron-LM (Shoeybi et al. 2019,
arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """The ranks of a worker, as one of them sees them. All of them call the methods in the same order.

    Attributes:
        size: T, their number.
        place: of this one among them.
    """

    @property
    def size(self) -> int: ...

    @property
    def place(self) -> int: ...

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, bit for bit the same on each; a new tensor."""

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, element by element; a new tensor."""


@dataclass(frozen=True)
class ProcessRanks:
    """Ranks that are processes."""

    size: int
    place: int
    group: dist.ProcessGroup
    #: Where the group's tensors are. Those of another device travel there and back.
    device: torch.device

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        result = tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=op, group=self.group)
        return result.to(tensor.device)


def enter(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """A tensor that is the same on every rank, where each uses it in another way: backward sums its gradient."""
    entered: torch.Tensor = _Enter.apply(tensor, ranks)
    return entered


def leave(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of every rank's part, which all ranks go on to use alike."""
    left: torch.Tensor = _Leave.apply(tensor, ranks)
    return left


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.total(outer), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return ranks.total(tensor)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        return outer, None
