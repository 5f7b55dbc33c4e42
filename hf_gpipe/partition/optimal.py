"""Partition by cost: split layers into consecutive stages so that the most expensive stage is minimal, under a memory
limit per stage.

The cost and the memory of a stage are functions of its index and its layers, because the last stage may not recompute
and an early one holds more micro-batches. The split is found by two dynamic programs over (stage, its end),

    slowest[s][j]  = min over i of max(slowest[s-1][i], cost(s, i, j))            the least bottleneck
    squares[s][i]  = min over j of cost(s, i, j)^2 + squares[s+1][j]              the most even split that has it

for all cuts i < j that leave each stage a layer and fit its memory. Both are exact; what makes them fast is that few
cuts are possible: for a bottleneck T every stage's end lies in a window, between where the stages after it can begin at
the earliest and where the stages up to it can end at the latest. The smallest T whose windows are not empty is found by
bisection, and it is nearly always the answer already.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition.count import by_count

StageCost = Callable[[int, int, int], float]
"""(stage, its first layer, the layer after its last) -> what that stage would cost, at least 0."""

#: Costs whose difference is a smaller fraction of the bottleneck count as equal: rounding must not choose the split.
_EQUAL = 1e-9
#: Bits in which the bottleneck is written in the sums of squares.
_BITS = 40


def by_cost(
    num_layers: int,
    num_stages: int,
    cost: StageCost,
    memory_bytes: StageCost | None = None,
    cap_bytes: float | None = None,
    *,
    memory_dip_bytes: float = 0.0,
) -> tuple[int, ...]:
    """The number of layers of each stage such that the cost of the most expensive stage is minimal.

    Ties go to the split with the least sum of squared costs, then to the one with longer first stages. Equal arguments
    give equal results.

    Args:
        num_layers: L.
        num_stages: K, at most L; every stage gets a layer.
        cost: the cost of a stage; a stage with more layers never costs less.
        memory_bytes: the memory that a stage needs.
        cap_bytes: the memory limit of a stage; None: no limit.
        memory_dip_bytes: the most by which a stage may need less memory than a part of it alone, because a boundary
            inside of it is not kept. Only the speed, and the least memory in the message, depend on it.

    Raises:
        PartitionError: no split fits the limit; names the limit that the least demanding split would fit.
    """
    if memory_bytes is None or cap_bytes is None:
        return _least(num_layers, num_stages, cost)
    # Usually the best split without a limit fits, and no search under the limit is needed.
    counts = _least(num_layers, num_stages, cost)
    if all(memory_bytes(*stage) <= cap_bytes for stage in stages_of(counts)):
        return counts
    leanest = _least(num_layers, num_stages, memory_bytes, dip=memory_dip_bytes)
    least_bytes = max(memory_bytes(*stage) for stage in stages_of(leanest))
    if least_bytes > cap_bytes:
        raise PartitionError(
            f"no split of {num_layers} layers into {num_stages} stages fits {_gib(cap_bytes)} per stage: the largest "
            f"stage of the least demanding split needs {_gib(least_bytes)}; allow that much, or use more stages or "
            "smaller micro-batches.",
            least_bytes / cap_bytes,
        )
    return _least(
        num_layers,
        num_stages,
        cost,
        fits=lambda *stage: memory_bytes(*stage) <= cap_bytes,
        reachable=max(cost(*stage) for stage in stages_of(leanest)),
    )


def stages_of(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(stage, first layer, the layer after its last) of each stage."""
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return [(stage, start, stop) for stage, (start, stop) in enumerate(pairwise(ends))]


def _least(
    num_layers: int,
    num_stages: int,
    cost: StageCost,
    *,
    fits: Callable[[int, int, int], bool] | None = None,
    dip: float = 0.0,
    reachable: float | None = None,
) -> tuple[int, ...]:
    """The split by least bottleneck, then sum of squares, then longer first stages.

    `reachable` is the bottleneck of an allowed split; None: every split is allowed.
    """
    search = _Search(num_layers, num_stages, cost, fits, dip)
    if reachable is None:
        # All layers together may cost less than a part of them, so the bottleneck is that of a split.
        reachable = max(cost(*stage) for stage in stages_of(by_count(num_layers, num_stages)))
    bound = search.least_bound(reachable)
    step = max(bound, reachable / num_stages) / 64
    while (bottleneck := search.bottleneck(bound)) is None:
        assert bound < reachable, "the reachable bottleneck is that of a split"
        bound, step = min(bound + step, reachable), 2 * step
    return search.most_even(bottleneck)


class _Search:
    """The cuts of one problem. A cut number s is the end of stage s; windows are inclusive."""

    def __init__(
        self,
        num_layers: int,
        num_stages: int,
        cost: StageCost,
        fits: Callable[[int, int, int], bool] | None,
        dip: float,
    ) -> None:
        self.num_layers = num_layers
        self.num_stages = num_stages
        self.cost = cost
        self.fits = fits
        self.dip = dip

    def least_bound(self, everything: float) -> float:
        """About the smallest bottleneck whose windows are not empty: a hair above it, so that it may be the answer."""
        low, high = 0.0, float(everything)
        while high - low > _EQUAL * everything / self.num_stages:
            middle = (low + high) / 2
            ends = self._latest_ends(self._limit(middle))
            stages = list(enumerate(pairwise([0, *ends])))
            if self._windows(middle, ends) is not None:
                high = middle
                if all(start < end for _, (start, end) in stages):
                    # A split, whose own bottleneck may be less.
                    high = min(high, max(self.cost(stage, start, end) for stage, (start, end) in stages))
            else:
                low = middle
                if ends[-1] < self.num_layers:
                    # The ends stay where they are up to the least cost of another layer.
                    longer = [(s, start, end + 1) for s, (start, end) in stages if end < self._last(s)]
                    least = min((self.cost(*stage) for stage in longer), default=0.0)
                    low = max(low, min((least - 2 * self.dip) / (1 + _EQUAL), high))
        return high

    def _limit(self, bound: float) -> float:
        # Costs are sums, which grow with the layers up to rounding.
        return bound * (1 + _EQUAL) + self.dip

    def _last(self, stage: int) -> int:
        """The last end of a stage that leaves a layer to each of those after it."""
        return self.num_layers - (self.num_stages - 1 - stage)

    def _latest_ends(self, limit: float) -> list[int]:
        """The latest end of each stage, where those before it end as late as they can."""
        ends, start = [], 0
        for stage in range(self.num_stages):
            start = self._last_end(stage, start, self._last(stage), limit)
            ends.append(start)
        return ends

    def windows(self, bound: float) -> list[range] | None:
        """The layers at which each stage can end if none costs more than `bound`, or None where there is no such cut.

        Cuts outside of a window are impossible; those inside need not be possible.
        """
        return self._windows(bound, self._latest_ends(self._limit(bound)))

    def _windows(self, bound: float, latest: list[int]) -> list[range] | None:
        if latest[-1] < self.num_layers:
            return None
        limit, earliest = self._limit(bound), [self.num_layers]
        for stage in reversed(range(1, self.num_stages)):
            earliest.append(self._first_start(stage, stage, earliest[-1], limit))
        earliest.reverse()
        if any(first > last for first, last in zip(earliest, latest, strict=True)):
            return None
        return [range(first, last + 1) for first, last in zip(earliest, latest, strict=True)]

    def _last_end(self, stage: int, start: int, last: int, limit: float) -> int:
        """The latest end at most `last` of a stage from `start` that costs at most `limit`; `start` where none."""
        # The last stage has one end; without the model's last layer it may cost more, such as one more boundary.
        low, high = (last - 1 if stage == self.num_stages - 1 else start), last + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.cost(stage, start, middle) <= limit:
                low = middle
            else:
                high = middle
        return low

    def _first_start(self, stage: int, first: int, end: int, limit: float) -> int:
        """The earliest start at least `first` of a stage to `end` that costs at most `limit`; `end` where none."""
        low, high = first - 1, end
        while high - low > 1:
            middle = (low + high) // 2
            if self.cost(stage, middle, end) <= limit:
                high = middle
            else:
                low = middle
        return high

    def bottleneck(self, bound: float) -> float | None:
        """The least bottleneck of all allowed splits; None where it is more than `bound`."""
        windows = self.windows(bound)
        if windows is None:
            return None
        slowest: dict[int, float] = {0: 0.0}
        for stage, window in enumerate(windows):
            reached: dict[int, float] = {}
            starts = sorted(slowest)
            for end in window:
                best = None
                for index in reversed(range(bisect_left(starts, end))):
                    start = starts[index]
                    cost = self.cost(stage, start, end)
                    # Earlier starts cost more still.
                    if cost * (1 - _EQUAL) - self.dip > (bound if best is None else best):
                        break
                    value = max(slowest[start], cost)
                    if value > bound or (best is not None and value >= best):
                        continue
                    if self.fits is None or self.fits(stage, start, end):
                        best = value
                if best is not None:
                    reached[end] = best
            slowest = reached
        return slowest.get(self.num_layers)

    def most_even(self, bottleneck: float) -> tuple[int, ...]:
        """The split with this bottleneck that has the least sum of squares, and then the longer first stages."""
        limit = bottleneck * (1 + _EQUAL)
        windows = self.windows(limit)
        assert windows is not None, "the bottleneck is that of a split"
        # A power of two, so that whole numbers stay exact and equal sums are seen to be equal.
        unit = math.ldexp(1, _BITS - math.frexp(bottleneck)[1])
        # From the last stage to the first, so that of equal splits the longest first stage can be taken.
        squares: dict[int, int] = {self.num_layers: 0}
        choices: list[dict[int, int]] = []
        for stage in reversed(range(self.num_stages)):
            starts = windows[stage - 1] if stage else range(1)
            ends = sorted(squares)
            best: dict[int, int] = {}
            choice: dict[int, int] = {}
            for start in starts:
                for index in range(bisect_right(ends, start), len(ends)):
                    end = ends[index]
                    cost = self.cost(stage, start, end)
                    if cost - self.dip > limit:
                        break
                    if cost > limit:
                        continue
                    value = squares[end] + round(cost * unit) ** 2
                    if (start not in best or value <= best[start]) and (
                        self.fits is None or self.fits(stage, start, end)
                    ):
                        best[start], choice[start] = value, end
            squares = best
            choices.append(choice)
        counts, start = [], 0
        for choice in reversed(choices):
            counts.append(choice[start] - start)
            start = choice[start]
        return tuple(counts)


def _gib(size: float) -> str:
    return f"{size / 2**30:.4g} GiB"
