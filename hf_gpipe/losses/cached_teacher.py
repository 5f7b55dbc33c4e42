"""A teacher's most likely tokens in the mini-batch, in place of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

#: Entries of a mini-batch: of each position the tokens (B, T, k), and the logarithms of their probabilities (B, T, k).
TEACHER_TOKENS, TEACHER_LOG_PROBS = "teacher_tokens", "teacher_log_probs"
#: The most that the probabilities of some tokens add up to, as a logarithm; TRL's.
_MOST = -1e-7


@dataclass(frozen=True)
class TopK:
    """The k most likely tokens of some positions.

    Attributes:
        tokens: (N, k), int64, no token twice at a position.
        log_probs: (N, k).
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def of_inputs(cls, inputs: Mapping[str, torch.Tensor]) -> TopK | None:
        """The tokens of a micro-batch, all positions in one row and without columns of padding; None: it has none."""
        if TEACHER_TOKENS not in inputs:
            return None
        columns = slice(inputs["labels"].shape[1])
        tokens, log_probs = (inputs[name][:, columns].flatten(0, 1) for name in (TEACHER_TOKENS, TEACHER_LOG_PROBS))
        return cls(tokens.long(), log_probs)

    def of(self, rows: slice) -> TopK:
        """The tokens of some positions, as `TeacherLogits.of`."""
        return TopK(self.tokens[rows], self.log_probs[rows])

    whole = __getitem__ = of

    def with_rest(self, dtype: torch.dtype) -> torch.Tensor:
        """The log-probabilities of the k tokens and of all others together, (N, k + 1)."""
        known = self.log_probs.to(dtype)
        rest = torch.log(-torch.expm1(known.logsumexp(-1, keepdim=True).clamp(max=_MOST)))
        return torch.cat([known, rest], dim=-1)
