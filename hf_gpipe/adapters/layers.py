"""A Hugging Face model as a list of layers, which a partition cuts into stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

LayerKind = Literal["vision", "embedding", "block", "norm", "head"]
StackName = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class Layer:
    """One entry of the list: modules of the Hugging Face model that are always on the same stage.

    `modules` are names in the whole model, in the order in which they are called. The layer has all their parameters,
    and the parameters of the modules in `idle`, which a forward on ids alone does not call.
    """

    name: str
    kind: LayerKind
    stack: StackName
    modules: tuple[str, ...]
    idle: tuple[str, ...] = ()

    @property
    def all_modules(self) -> tuple[str, ...]:
        return (*self.modules, *self.idle)


@dataclass(frozen=True)
class Given:
    """Shape and type of hidden states of a tiny clone, (B, T, ..., D)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def streams(self) -> tuple[int, ...]:
        """Dimensions between the length and the width, in models with several residual streams."""
        return self.shape[2:-1]


@dataclass(frozen=True)
class Stack:
    """A list of blocks that run in order, each once, and the modules before and after them, by their names in a model.

    Attributes:
        block_list: the list of the blocks.
        blocks: the blocks, in their order.
        num_outputs: length of the tuple or list that a block returns, hidden states first; None: it returns no tuple.
        hidden: the hidden states that a block returns.
        idle: modules with weights that a forward on ids alone does not call, such as an image encoder.
        output: the class that the module around the list returns.
    """

    name: StackName
    block_list: str
    embedding: tuple[str, ...]
    blocks: tuple[str, ...]
    norm: tuple[str, ...]
    num_outputs: int | None
    hidden: Given
    idle: tuple[str, ...]
    output: type

    @property
    def path(self) -> str:
        """The name of the module around the list."""
        return self.block_list.rpartition(".")[0]

    def of(self, model: PreTrainedModel) -> Stack:
        """Return the corresponding stack of a model that differs only in its number of blocks."""
        numbers = range(len(model.get_submodule(self.block_list)))
        return replace(self, blocks=tuple(f"{self.block_list}.{number}" for number in numbers))

    def layers(self) -> Iterator[Layer]:
        yield Layer(self.embedding[0], "embedding", self.name, self.embedding, self.idle)
        for block in self.blocks:
            yield Layer(block, "block", self.name, (block,))
        if self.norm:
            yield Layer(self.norm[0], "norm", self.name, self.norm)
