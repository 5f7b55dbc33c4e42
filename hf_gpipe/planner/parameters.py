"""The size of some weights, of which the sizes of gradients and optimizer state follow."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub


@dataclass(frozen=True)
class Parameters:
    """The size of some weights. `num_bytes` counts no gradients, which are as large for trainable weights.

    `exact_count` of the trainable elements are in embeddings or small tensors, which have no optimizer state of 8 bits.
    """

    count: int = 0
    num_bytes: int = 0
    trainable_count: int = 0
    trainable_bytes: int = 0
    exact_count: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*map(add, vars(self).values(), vars(other).values()))

    def divided(self, number: int) -> Parameters:
        """The size of one of `number` equal parts, rounded up."""
        return Parameters(*(-(-value // number) for value in vars(self).values()))

    def __sub__(self, other: Parameters) -> Parameters:
        return Parameters(*map(sub, vars(self).values(), vars(other).values()))
