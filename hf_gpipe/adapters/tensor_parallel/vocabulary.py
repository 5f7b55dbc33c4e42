"""The part of the vocabulary whose logits a rank makes."""

from __future__ import annotations

from dataclasses import dataclass

from hf_gpipe.adapters.tensor_parallel.ranks import Ranks


@dataclass(frozen=True)
class VocabularyPart:
    """A run of tokens.

    Attributes:
        first: number of its first token.
        size: V, the number of tokens of all ranks together.
        ranks: that have the other parts.
    """

    first: int
    size: int
    ranks: Ranks

    @property
    def longest(self) -> int:
        """The number of tokens of the longest part."""
        return -(-self.size // self.ranks.size)
