"""Tensors that the chunks of a row leave to later chunks: keys and values of blocks, logits of routers; with gradients.

Backward runs over the chunks in reverse. What the backward of a chunk finds for the states of earlier chunks waits here
for their backward.
"""

from __future__ import annotations

from typing import Any

import torch


class States:
    """The keys, or the values, of some rows in one block, or the logits of one router, and their gradient.

    Args:
        length: T, tokens of the rows. The shape is (..., T, width), for keys and values (B, heads, T, width).
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._states: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None

    def put(self, states: torch.Tensor, start: int) -> torch.Tensor:
        """Write the states (..., t, width) of the tokens from `start` on, and return the states of all tokens.

        Writing the same states again changes nothing.
        """
        if self._states is None:
            self._states = states.new_zeros((*states.shape[:-2], self._length, states.shape[-1]))
        self._states[..., start : start + states.shape[-2], :] = states
        # A graph keeps a view, and later chunks write beside it: autograd need not count their writes.
        return self._states.data

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in memory, of all tokens, and their gradient; none before the first F."""
        return [] if self._states is None else [self._states, self.gradient()]

    def gradient(self) -> torch.Tensor:
        """The sum of the gradients so far, for all tokens."""
        assert self._states is not None, "a backward without its forward"
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._states)
        return self._gradient


class _Append(torch.autograd.Function):
    """See `append`."""

    @staticmethod
    def forward(ctx: Any, added: torch.Tensor, states: States, start: int, first: int) -> torch.Tensor:
        stop = start + added.shape[-2]
        ctx.of = states, start, first, stop
        return states.put(added, start)[..., first:stop, :]

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        states, start, first, stop = ctx.of
        gradient = states.gradient()
        gradient[..., first:stop, :] += outer[0]
        return gradient[..., start:stop, :].clone(), None, None, None


# A compiled graph would count the writes of later chunks, and may make no tensor that stays.
@torch.compiler.disable
def append(added: torch.Tensor, states: States, start: int, first: int = 0) -> torch.Tensor:
    """Add a chunk's states to the states of the chunks before it, and return all of them from token `first` on.

    In backward, which runs over the chunks in reverse, the gradient of earlier chunks' states is kept in `states` for
    their own backward.

    Args:
        added: the chunk's states, (..., t, width).
        states: the states of the rows.
        start: the chunk's first token.
        first: the first token of the result, (..., start + t - first, width).
    """
    result: torch.Tensor = _Append.apply(added, states, start, first)
    return result
