"""A process's part of a head that is divided by the vocabulary over the stages of a pipeline.

The head is a model of its own beside each stage, with the rows of the matrix that the stages of this process have. A
process whose stages use the tied embedding has the whole matrix already, and no part of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hf_gpipe.adapters.division import StageDivision
from hf_gpipe.adapters.parts.cuts import Cut
from hf_gpipe.adapters.parts.ranks import Ranks


class HeadDivision(StageDivision):
    """Which rows of the head's tensors the processes of a pipeline have.

    Args:
        cut: the cut of the head's weight, and of its bias.
        parts: names of the tensors of which this process has a part.
        copies: names of the tensors that every process has whole, such as buffers.
        ranks: the processes, each with its part; None: this one has everything.
    """

    def __init__(self, cut: Cut, parts: Collection[str], copies: Collection[str], ranks: Ranks | None) -> None:
        self.cut, self._parts, self._copies, self._ranks = cut, frozenset(parts), frozenset(copies), ranks

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This process's part of a parameter, or of a tensor of its shape, in memory of its own."""
        if name not in self._parts or self._ranks is None:
            return whole
        return self.cut.part(whole, self._ranks.place).clone(memory_format=torch.contiguous_format)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of a tensor of its shape. All processes of the first replica call it."""
        return part if self._ranks is None or name not in self._parts else self.cut.gathered(part, self._ranks)

    def writes(self, name: str) -> bool:
        """Whether this process writes a tensor that others have, or have parts of; the last one does."""
        is_shared = self._ranks is not None and name in self._parts | self._copies
        return not is_shared or self._ranks is None or self._ranks.place == self._ranks.size - 1

    def rows(self, name: str) -> tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]]:
        of_all = tuple(part for (part,) in self.cut.parts)
        return (of_all[self._ranks.place] if name in self._parts and self._ranks is not None else None), of_all


class HeadRows:
    """The rows of a divided head that belong to one stage.

    Attributes:
        first: number of the stage's first token.
        size: V, the tokens of the vocabulary.
        rows: the stage's rows among the rows that its process has.
    """

    def __init__(self, stages: Sequence[int], stage: int, num_stages: int, size: int, *, is_whole: bool) -> None:
        self.size, self._num_stages = size, num_stages
        self.first, stop = self.of_stage(stage)
        offset = 0 if is_whole else self.of_stage(stages[0])[0]
        self.rows = slice(self.first - offset, stop - offset)

    def of_stage(self, stage: int) -> tuple[int, int]:
        """The tokens of any stage, from a first one to the one after its last."""
        return self.size * stage // self._num_stages, self.size * (stage + 1) // self._num_stages
