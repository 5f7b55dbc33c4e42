"""The ranks of a worker, each with a part of every divided layer, and how tensors enter and leave the divided part.

What enters is the same on every rank, and each rank's part of the gradient is summed on the way back. What leaves is
summed, and its gradient is the same on every rank. These are the operators f and g of Megatron-LM (Shoeybi et al. 2019,
arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hf_gpipe.settings.division import Division

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A tensor -> another tensor."""


class Ranks(ABC):
    """The ranks of a worker, as one of them sees them. All of them call the methods in the same order.

    Attributes:
        division: how layers are divided among them.
        place: the number of this rank among them, counted from 0.
    """

    division: Division
    place: int

    @property
    def size(self) -> int:
        """T, the number of ranks."""
        return self.division.num_ranks

    @abstractmethod
    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, bit for bit the same on each; a new tensor."""

    @abstractmethod
    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `total`, whose result the function that is returned waits for. On CUDA the host does not wait."""

    @abstractmethod
    def gathered(self, part: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """Return the parts of all ranks, of these lengths along `dim`, one after the other."""

    @abstractmethod
    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, element by element; a new tensor."""


@dataclass(eq=False)
class ProcessRanks(Ranks):
    """Ranks that are processes."""

    division: Division
    place: int
    group: dist.ProcessGroup
    #: The device of the group's tensors. Tensors of another device travel there and back.
    device: torch.device

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.begin_total(tensor)()

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._begun(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._begun(tensor, dist.ReduceOp.MAX)()

    def gathered(self, part: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        longest, leading = max(lengths), part.detach().movedim(dim, 0)
        padded = torch.zeros(longest, *leading.shape[1:], dtype=part.dtype, device=self.device)
        padded[: len(leading)] = leading
        result = torch.empty(self.size * longest, *leading.shape[1:], dtype=part.dtype, device=self.device)
        dist.all_gather(list(result.split(longest)), padded, group=self.group)
        of_ranks = [values[:length] for values, length in zip(result.split(longest), lengths, strict=True)]
        return torch.cat(of_ranks).movedim(0, dim).contiguous().to(part.device)

    def _begun(self, tensor: torch.Tensor, op: Any) -> Callable[[], torch.Tensor]:
        result = tensor.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)
        work = dist.all_reduce(result, op=op, group=self.group, async_op=True)

        def end() -> torch.Tensor:
            work.wait()
            return result.to(tensor.device)

        return end


def enter(tensor: torch.Tensor, ranks: Ranks, meanwhile: Callable[[], object] | None = None) -> torch.Tensor:
    """A tensor that is the same on every rank, where each uses it in another way: backward sums its gradient.

    Args:
        tensor: the tensor.
        ranks: the ranks of the worker.
        meanwhile: called in backward while the gradient is summed.
    """
    total = ranks.total if meanwhile is None else ending(ranks.begin_total, meanwhile)
    return exchange(tensor, lambda same: same.view_as(same), total)


def leave(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum of every rank's part, which all ranks go on to use alike."""
    return exchange(tensor, ranks.total, lambda outer: outer)


def ending(begin: Callable[[torch.Tensor], Callable[[], torch.Tensor]], meanwhile: Callable[[], object]) -> Change:
    """A sum over the ranks that `begin` begins and that is waited for after `meanwhile` has been called."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        end = begin(tensor)
        meanwhile()
        return end()

    return change


def exchange(tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
    """The result of `forward`. In backward, `backward` makes the tensor's gradient from the result's."""
    made: torch.Tensor = _Exchange.apply(tensor, forward, backward)
    return made


class _Exchange(torch.autograd.Function):
    """See `exchange`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(outer), None, None
