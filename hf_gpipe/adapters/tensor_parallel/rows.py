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

import torch

from hf_gpipe.adapters.tensor_parallel.cuts import dealt, lengths
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks

DIM = 1
"""The dimension of the positions in hidden states (B, T, D)."""


class Rows:
    """How the positions of the hidden states at hand are divided.

    Args:
        length: T, the number of positions.
        ranks: the ranks, each with its part.
    """

    def __init__(self, length: int, ranks: Ranks) -> None:
        self.length, self.ranks = length, ranks
        runs = dealt(length, ranks.size)
        self.lengths, (self._first, stop) = lengths(runs), runs[ranks.place]
        self._own = stop - self._first

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of whole hidden states, in memory of its own."""
        return whole.narrow(DIM, self._first, self._own).clone(memory_format=torch.contiguous_format)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole hidden states from the parts of all ranks."""
        return self.ranks.gathered(part, DIM, self.lengths)

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to sum a whole tensor over the ranks; the function that is returned gives this rank's part."""
        return self.ranks.begin_total_part(tensor, DIM, self.lengths)
