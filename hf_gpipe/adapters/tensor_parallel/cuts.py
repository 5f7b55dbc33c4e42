"""How a tensor is cut into the parts that the ranks of a worker have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_gpipe.adapters.tensor_parallel.ranks import Ranks

Runs = tuple[tuple[int, int], ...]
"""Runs of indices, each from a first one to the one after its last."""


@dataclass(frozen=True)
class Cut:
    """The parts of a tensor.

    Attributes:
        dim: along which it is cut.
        parts: for each rank the runs of indices that it has, which lie one after another in its part. Two ranks have
            the same, where they share a key-value head, or no index in common.
    """

    dim: int
    parts: tuple[Runs, ...]

    @classmethod
    def of_packs(cls, dim: int, packs: Sequence[int], size: int, units: Sequence[int] | None = None) -> Cut:
        """Cut each of several packs, such as q, k and v in one matrix, into as many parts as there are ranks.

        Args:
            dim: along which.
            packs: the length of each pack.
            size: T.
            units: of each pack how many units it has that stay whole, such as heads, a multiple or a divisor of T;
                None: one for each index.
        """
        starts = [sum(packs[:number]) for number in range(len(packs))]
        parts = []
        for place in range(size):
            runs = []
            for start, length, count in zip(starts, packs, units or packs, strict=True):
                first, last = count * place // size, count * (place + 1) // size
                if units is not None:  # with fewer of them than ranks, neighbouring ranks share one
                    last = max(last, first + 1)
                runs.append((start + first * length // count, start + last * length // count))
            parts.append(tuple(runs))
        return cls(dim, tuple(parts))

    def of_groups(self, size: int) -> Cut:
        """The cut of a tensor with an entry for each `size` indices."""
        return Cut(self.dim, tuple(tuple((start // size, stop // size) for start, stop in runs) for runs in self.parts))

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """A rank's part of a whole tensor; a view where it is one run."""
        found = [whole.narrow(self.dim, start, stop - start) for start, stop in self.parts[place]]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def counts(self, place: int) -> bool:
        """Whether a rank's part is counted, and not one before it that is the same."""
        return self.parts.index(self.parts[place]) == place

    @property
    def is_shared(self) -> bool:
        """Whether ranks have the same part."""
        return len(set(self.parts)) < len(self.parts)

    def shape_of_part(self, whole: Sequence[int], place: int) -> torch.Size:
        """The shape of a rank's part of a tensor of a shape."""
        shape = list(whole)
        shape[self.dim] = sum(stop - start for start, stop in self.parts[place])
        return torch.Size(shape)

    def whole_shape(self, part: torch.Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        shape = list(part.shape)
        shape[self.dim] = max(stop for runs in self.parts for _, stop in runs)
        return torch.Size(shape)

    def spread(self, part: torch.Tensor, place: int) -> torch.Tensor:
        """A whole tensor with a rank's part in it, and zeros elsewhere."""
        whole = part.new_zeros(self.whole_shape(part))
        sizes = [stop - start for start, stop in self.parts[place]]
        for (start, stop), values in zip(self.parts[place], part.split(sizes, self.dim), strict=True):
            whole.narrow(self.dim, start, stop - start).copy_(values)
        return whole

    def total(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The sum of a part over the ranks that have it; all ranks call it."""
        return self.part(ranks.total(self.spread(part, ranks.place)), ranks.place).contiguous()

    def gathered(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The whole tensor, bit for bit, from the parts of all ranks, which all call it."""
        own = part.detach() if self.counts(ranks.place) else torch.zeros_like(part)
        # As bytes: a sum of floating-point numbers would turn -0.0 into 0.0.
        whole = self.spread(own, ranks.place)
        return ranks.total(whole.view(torch.uint8)).view(whole.dtype)
