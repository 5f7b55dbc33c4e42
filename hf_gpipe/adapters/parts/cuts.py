"""How a tensor is cut into the parts that the ranks of a worker have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from hf_gpipe.adapters.parts.ranks import Ranks

Runs = tuple[tuple[int, int], ...]
"""Runs of indices or of units, each from a first one to the one after its last."""


def dealt(count: int, size: int) -> Runs:
    """Deal `count` units out to `size` ranks as evenly as possible; the first ranks get the most."""
    each, more = divmod(count, size)
    stops = [place * each + min(place, more) for place in range(size + 1)]
    return tuple(pairwise(stops))


@dataclass(frozen=True)
class Heads:
    """The heads of an attention that each rank has: whole groups, or a part of one group.

    Attributes:
        queries: the run of query heads of each rank.
        pairs: the run of heads of keys and values that the query heads of each rank read.
        width: the width of a head.
    """

    queries: Runs
    pairs: Runs
    width: int = 1

    @classmethod
    def of(cls, num_queries: int, num_pairs: int, size: int, width: int = 1) -> Heads:
        """Whole groups for each rank; with fewer groups than ranks, some ranks share one and its queries.

        The first rank has as many heads as any. There are as many query heads as ranks, or more.
        """
        group = num_queries // num_pairs
        if num_pairs >= size:
            pairs = dealt(num_pairs, size)
            return cls(tuple((group * first, group * stop) for first, stop in pairs), pairs, width)
        # The first groups have the fewest ranks, and so the longest parts.
        numbers = [stop - first for first, stop in reversed(dealt(size, num_pairs))]
        own = [(pair, first, stop) for pair, number in enumerate(numbers) for first, stop in dealt(group, number)]
        return cls(
            tuple((pair * group + first, pair * group + stop) for pair, first, stop in own),
            tuple((pair, pair + 1) for pair, _, _ in own),
            width,
        )


def scaled(runs: Runs, width: int) -> Runs:
    """Return the runs of indices of runs of units, each of which has `width` indices."""
    return tuple((width * first, width * stop) for first, stop in runs)


def lengths(runs: Runs) -> tuple[int, ...]:
    """The number of units of each rank."""
    return tuple(stop - first for first, stop in runs)


@dataclass(frozen=True)
class Cut:
    """The parts of a tensor.

    Attributes:
        dim: the dimension along which it is cut.
        parts: the runs of indices that each rank has, which lie one after another in its part. Two ranks have the same
            run where they share a key-value head; otherwise runs do not overlap.
    """

    dim: int
    parts: tuple[Runs, ...]

    @classmethod
    def from_packs(cls, dim: int, packs: Sequence[Runs]) -> Cut:
        """Cut each of several packs that lie one after another, such as q, k and v in one matrix.

        Args:
            dim: the dimension along which they are cut.
            packs: the run of indices in each pack that each rank has.
        """
        ends = list(accumulate(max(stop for _, stop in runs) for runs in packs))
        starts = [0, *ends[:-1]]
        placed = [tuple((at + a, at + b) for a, b in runs) for at, runs in zip(starts, packs, strict=True)]
        return cls(dim, tuple(zip(*placed, strict=True)))

    def of_groups(self, size: int) -> Cut:
        """Return the cut of a tensor with an entry for each `size` indices."""
        return Cut(self.dim, tuple(tuple((start // size, stop // size) for start, stop in runs) for runs in self.parts))

    def part(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """A rank's part of a whole tensor; a view where it is one run."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.parts[place]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def counts(self, place: int) -> tuple[bool, ...]:
        """Return whether each run of a rank's part is counted: a run that an earlier rank has too is not."""
        before = {run for runs in self.parts[:place] for run in runs}
        return tuple(run not in before for run in self.parts[place])

    def counted(self, part: torch.Tensor, place: int) -> list[torch.Tensor]:
        """The runs of a rank's part, or of a tensor of its shape, that are counted, as views."""
        runs = part.split(lengths(self.parts[place]), self.dim)
        return [run for run, counts in zip(runs, self.counts(place), strict=True) if counts]

    @property
    def is_shared(self) -> bool:
        """Whether ranks have the same part."""
        return not all(all(self.counts(place)) for place in range(len(self.parts)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each rank's part along the dimension."""
        return tuple(sum(lengths(runs)) for runs in self.parts)

    def whole_shape(self, part: torch.Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        shape = list(part.shape)
        shape[self.dim] = max(stop for runs in self.parts for _, stop in runs)
        return torch.Size(shape)

    def spread(self, part: torch.Tensor, place: int) -> torch.Tensor:
        """A whole tensor with a rank's part in it, and zeros elsewhere."""
        whole = part.new_zeros(self.whole_shape(part))
        own = self.parts[place]
        for (start, stop), values in zip(own, part.split(lengths(own), self.dim), strict=True):
            whole.narrow(self.dim, start, stop - start).copy_(values)
        return whole

    def total(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The sum of a part over the ranks that have it; all ranks call it."""
        return self.part(ranks.total(self.spread(part, ranks.place)), ranks.place).contiguous()

    def gathered(self, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The whole tensor, bit for bit, from the parts of all ranks, which all call it."""
        # As bytes: a sum of floating-point numbers would turn -0.0 into 0.0.
        whole = self.spread(part.detach(), ranks.place)
        for (start, stop), counts in zip(self.parts[ranks.place], self.counts(ranks.place), strict=True):
            if not counts:
                whole.narrow(self.dim, start, stop - start).zero_()
        return ranks.total(whole.view(torch.uint8)).view(whole.dtype)


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary whose logits a rank makes: a run of tokens.

    Attributes:
        first: the number of its first token.
        size: V, the number of tokens of all ranks together.
        ranks: the ranks, each with its part.
    """

    first: int
    size: int
    ranks: Ranks

    @property
    def longest(self) -> int:
        """The number of tokens of the longest part."""
        return -(-self.size // self.ranks.size)
