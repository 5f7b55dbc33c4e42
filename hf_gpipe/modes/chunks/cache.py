"""The keys and values of rows that are cut into chunks: a chunk's blocks add theirs, and attend to all before it.

A long row is cut into chunks of tokens, which go through the stages one after another (TeraPipe, arXiv 2102.07988,
section 3; Seq1F1B, arXiv 2406.03488). A causal model needs nothing of an earlier chunk but the keys and values of each
block, and transformers' own cache brings these to the family's own attention. The last stage also keeps the logits of
the experts' routers, of which the last chunk computes the auxiliary loss. The backward of that chunk, which comes
first, leaves the gradients of the other chunks' logits to their own backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hf_gpipe.adapters.cache import CountingSlot, StageCache
from hf_gpipe.adapters.stage_model import StageModel
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.transformers import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from hf_gpipe.modes.chunks.states import States, append


class _Slot(DynamicLayer):
    """The slot of one block at the beginning of a chunk."""

    def __init__(self, parts: tuple[States, States], start: int) -> None:
        CacheLayerMixin.__init__(self)
        self._parts, self._start = parts, start
        self._stop = start
        self.is_initialized = True

    @property
    def _first(self) -> int:
        """The first token that the chunk attends to."""
        return 0

    def get_seq_length(self) -> int:
        return self._stop

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length - self._first, self._first

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Set, not added: a block that is run again for its gradients comes here a second time.
        self._stop = self._start + key_states.shape[-2]
        keys, values = (
            append(states, part, self._start, self._first)
            for states, part in zip((key_states, value_states), self._parts, strict=True)
        )
        return keys, values


class _SlidingSlot(_Slot, DynamicSlidingWindowLayer):
    """The slot of a block that attends to a window: what lies before the window is not read."""

    def __init__(self, parts: tuple[States, States], start: int, sliding_window: int) -> None:
        _Slot.__init__(self, parts, start)
        self.sliding_window = sliding_window
        self.record_past = False

    @property
    def _first(self) -> int:
        return max(self._start - self.sliding_window + 1, 0)

    @property
    def cumulative_length(self) -> int:
        return self._stop


@dataclass(frozen=True)
class ChunkRouters:
    """The router logits of rows that are cut into chunks, at one of the chunks.

    Attributes:
        states: the logits (B, T, experts) of each router.
        start: the chunk's first token.
        num_rows: B, the number of rows.
        is_last: whether the chunk is the rows' last one.
    """

    states: Sequence[States]
    start: int
    num_rows: int
    is_last: bool

    def joined(self, logits: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the logits (B t, experts) of the chunk behind the logits of the chunks before it."""
        of_rows = (logit.unflatten(0, (self.num_rows, -1)) for logit in logits)
        return tuple(
            append(of_router, states, self.start).flatten(0, 1)
            for of_router, states in zip(of_rows, self.states, strict=True)
        )


class RowCache:
    """The tensors that one stage keeps of a micro-batch's rows between its first F and its last B.

    These are the keys and values of its blocks, and on the last stage the logits of all routers.

    Args:
        stage: the model of the stage.
        length: the number of tokens of each row.
    """

    def __init__(self, stage: StageModel, length: int) -> None:
        self._stage = stage
        blocks = stage.adapter.stacks[-1].blocks
        self._length = length
        self._parts = [(States(length), States(length)) for _ in blocks]
        self._routers = [States(length) for _ in stage.adapter.routers if stage.is_last]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are kept of the rows from their first F to their last B, with gradients."""
        parts = [*chain.from_iterable(self._parts), *self._routers]
        return [tensor for states in parts for tensor in states.tensors()]

    def at(self, start: int) -> StageCache:
        """The cache that the stage's model gets with the chunk that begins at a token.

        Raises UnsupportedModelError where a block keeps anything other than keys and values of the past or of a window.
        """
        cache = StageCache(self._stage)
        cache.advance(start)
        for index, slot in enumerate(cache.layers):
            if isinstance(slot, CountingSlot):
                continue
            if type(slot) is DynamicLayer:
                cache.layers[index] = _Slot(self._parts[index], start)
            elif type(slot) is DynamicSlidingWindowLayer:
                cache.layers[index] = _SlidingSlot(self._parts[index], start, slot.sliding_window)
            else:
                raise UnsupportedModelError(
                    f"{self._stage.adapter.config.model_type}: block {index} keeps a {type(slot).__name__}, which "
                    "cannot be cut into chunks of tokens"
                )
        return cache

    def routers_at(self, start: int, num_rows: int, num_tokens: int) -> ChunkRouters:
        """The router logits of the rows, for the chunk of so many tokens that begins at a token."""
        return ChunkRouters(self._routers, start, num_rows, is_last=start + num_tokens == self._length)
