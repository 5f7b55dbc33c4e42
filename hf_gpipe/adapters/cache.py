"""The key-value caches of generation: each stage keeps the keys and values of its own blocks.

A model gets the length of the past, and from it positions and the sizes of masks, from the first slot of its cache or
the first slot of a type. On most stages that slot belongs to a block of another stage, so such slots count tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache

from hf_gpipe.adapters.stage_model import StageModel
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.transformers import DynamicLayer, DynamicSlidingWindowLayer


class CountingSlot:
    """Slot of a block on another stage: counts the tokens that the block has seen, and stores none of them."""

    cumulative_length = 0

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass


class _FullCount(CountingSlot, DynamicLayer):
    """Slot of a block that attends to the whole past."""


class _SlidingCount(CountingSlot, DynamicSlidingWindowLayer):
    """Slot of a block that attends to a window of the past."""


class StageCache(DynamicCache):
    """The cache of one stage's decoder blocks. `advance` must be called after every forward of the pipeline.

    Raises UnsupportedModelError where a block keeps anything other than keys and values of the past or of a window.
    """

    def __init__(self, stage: StageModel) -> None:
        config = stage.adapter.config
        super().__init__(config=config)
        own = {layer.name for layer in stage.layers}
        blocks = stage.adapter.stacks[-1].blocks
        # LongCat-Flash has two attentions, and so two slots, in each block.
        each, rest = divmod(len(self.layers), len(blocks))
        if rest or not each:
            raise UnsupportedModelError(
                f"{config.model_type}: {len(blocks)} blocks keep {len(self.layers)} caches in generation, and which "
                "block has which is not known; generate with plain transformers from a saved checkpoint"
            )
        for index, slot in enumerate(self.layers):
            if blocks[index // each] in own:
                continue
            if type(slot) is DynamicLayer:
                self.layers[index] = _FullCount()
            elif type(slot) is DynamicSlidingWindowLayer:
                self.layers[index] = _SlidingCount(slot.sliding_window)
            else:
                raise UnsupportedModelError(
                    f"{config.model_type}: block {index // each} keeps a {type(slot).__name__} in generation, which no "
                    "other stage can count; generate with plain transformers from a saved checkpoint"
                )

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of one forward in the slots of other stages' blocks; the own slots have grown already."""
        for slot in self.layers:
            if isinstance(slot, CountingSlot):
                slot.cumulative_length += num_tokens


class PipelineCache(Cache):
    """The caches of all stages of this process as one: `generate` asks it for the length and reorders its beams.

    Args:
        stages: the stages of this process, by number.
    """

    def __init__(self, stages: Mapping[int, StageModel]) -> None:
        self._past = {number: StageCache(stage) for number, stage in stages.items()}
        #: The cache that each stage's model gets.
        self.of_stage: dict[int, Cache] = dict(self._past)
        slots = [slot for cache in self._past.values() for slot in cache.layers]
        for number, stage in stages.items():
            if stage.adapter.config.is_encoder_decoder:
                source = DynamicCache(config=stage.adapter.config)
                slots += source.layers
                self.of_stage[number] = EncoderDecoderCache(self._past[number], source)
        super().__init__(layers=slots)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of one forward in the caches of all stages."""
        for cache in self._past.values():
            cache.advance(num_tokens)
