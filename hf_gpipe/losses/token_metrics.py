"""Metrics of target tokens beside their loss: how many the model ranks first, and how unsure it is.

They are sums on the device over the micro-batches of a mini-batch, read when they are logged, so no step
waits for them. Like TRL's, a metric of several mini-batches is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

#: Probabilities that the entropy is computed from at a time, for its terms take as much memory.
_PART = 1 << 20

Sums: TypeAlias = dict[tuple[int, int], list[float]]
"""(step, mini-batch) -> its tokens, those that the model ranks first, and the sum of the entropies."""


@dataclass(frozen=True)
class TokenMetrics:
    """The metrics of the mini-batches since they were last taken.

    Attributes:
        mini_batch: whether it is trained on, and its name; None: nothing is noted.
    """

    mini_batch: tuple[bool, tuple[int, int]] | None = None
    _sums: dict[tuple[bool, tuple[int, int]], torch.Tensor] = field(default_factory=dict)

    def of(self, mini_batch: tuple[int, int], *, is_training: bool) -> TokenMetrics:
        """The metrics as a mini-batch adds to them, under its name."""
        return replace(self, mini_batch=(is_training, mini_batch))

    def add(
        self,
        is_unit: torch.Tensor,
        is_first: torch.Tensor,
        probabilities: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Add tokens; nothing is read from the device.

        Args:
            is_unit: which are targets, (N,).
            is_first: whether the model ranks each target first, (N,).
            probabilities: (N, V), or of a part of the vocabulary.
            total: sums over the parts; None: there is one.
        """
        if self.mini_batch is None:
            return
        rows = max(1, _PART // probabilities.shape[1])
        entropies = torch.cat([torch.special.entr(part).sum(-1) for part in probabilities.split(rows)])
        self.add_entropies(is_unit, is_first, entropies if total is None else total(entropies))

    def add_entropies(self, is_unit: torch.Tensor, is_first: torch.Tensor, entropies: torch.Tensor) -> None:
        """`add`, from the entropy of each token's distribution, (N,)."""
        if self.mini_batch is None:
            return
        columns = torch.stack([torch.ones_like(entropies), is_first.to(entropies), entropies])
        sums = columns.masked_fill(~is_unit, 0).sum(1, dtype=torch.float64)
        self._sums[self.mini_batch] = self._sums.get(self.mini_batch, 0) + sums

    def take(self, *, is_training: bool) -> Sums:
        """The sums of this process since the last call, which are then forgotten."""
        names = [name for name in self._sums if name[0] == is_training]
        if not names:
            return {}
        values = torch.stack([self._sums.pop(name) for name in names]).tolist()
        return {name[1]: value for name, value in zip(names, values, strict=True)}


def means(sums: Iterable[Sums]) -> dict[str, float]:
    """The means over mini-batches of the sums of all processes: `entropy` and `mean_token_accuracy`."""
    total: dict[tuple[int, int], Any] = {}
    for own in sums:
        for name, values in own.items():
            total[name] = [a + b for a, b in zip(total.get(name, (0.0, 0.0, 0.0)), values, strict=True)]
    if not total:
        return {}
    ratios = [(entropy / max(count, 1), first / max(count, 1)) for count, first, entropy in total.values()]
    names = ("entropy", "mean_token_accuracy")
    return {name: sum(column) / len(ratios) for name, column in zip(names, zip(*ratios, strict=True), strict=True)}
