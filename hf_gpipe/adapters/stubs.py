"""Stubs that replace the layers of other stages in a stage's model, and how tensors enter and leave the model.

A stage is the Hugging Face model itself: its own layers are real and the model's own forward runs, so masks, rotary
embeddings and everything that a family computes between the layers come from the library, unchanged. Layers of other
stages are replaced by the stubs below, which have no parameters. In each forward

* the received hidden states replace the input of the stage's first layer (`admit`), and
* the stage sends the input of the next stage's first layer (`PassThrough`).

So hidden states leave and enter at the same point, the input of a layer, and what the family computes between two
layers runs exactly once, on the sender.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters.layers import StackName
from hf_gpipe.adapters.modules.dropout import DropoutSeeds
from hf_gpipe.adapters.modules.intercept import hidden_of, intercept, with_hidden


class Port:
    """The hidden states that enter and leave a stage's model in one forward, with its seeds and documents.

    It holds tensors only while `StageModel.__call__` runs. Backward does not read it: the received states enter
    outside of the part that a block's activation checkpointing runs again, so a recomputation never gets the tensors
    of another micro-batch.
    """

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None
        self.captured: torch.Tensor | None = None
        self.seeds: DropoutSeeds | None = None
        #: The number of tokens of each document of a packed row, for each stack; empty for other rows.
        self.lengths: Mapping[StackName, tuple[int, ...]] = {}
        #: The number of tokens of the whole rows, where the forward has a part of them; None: the rows are whole.
        self.row_length: int | None = None

    def close(self) -> None:
        self.received = self.captured = self.seeds = self.row_length = None
        self.lengths = {}


class PassThrough(nn.Module):
    """Replaces a block or a norm of another stage: returns its input, and records it at the end of the stage.

    Args:
        port: where the input is recorded; None: it is not recorded.
        num_outputs: length of the returned tuple, hidden states first; None: they are returned alone.
    """

    def __init__(self, port: Port | None = None, num_outputs: int | None = None) -> None:
        super().__init__()
        self.port = port
        self.num_outputs = num_outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Without `forward`, and the hooks of `Module.__call__`: a stage of a deep model calls many of these in each
        # action.
        hidden = args[0] if args else hidden_of(args, kwargs)
        if self.port is not None:
            self.port.captured = hidden
        return hidden if self.num_outputs is None else (hidden, *[None] * (self.num_outputs - 1))


class WholeSlices:
    """Mixed into the class of a `ModuleList`: a slice of all its modules is the list itself.

    A model's forward iterates over `self.layers[:num_hidden_layers]`, for which a `ModuleList` makes another one: of 80
    layers that takes a quarter of a millisecond in each action, more than their stubs do.
    """

    def __getitem__(self, index: Any) -> Any:
        modules: Any = self
        if isinstance(index, slice) and index.indices(len(modules)) == (0, len(modules), 1):
            return self
        return super().__getitem__(index)  # type: ignore[misc]  # that of ModuleList, which follows in the MRO


class EmbeddingStub(nn.Module):
    """Replaces an embedding or its projection of another stage: returns zeros of the right shape, without memory.

    The model still computes positions and masks from the ids; the zeros themselves never reach a layer.

    Args:
        width: D, the width of the embeddings.
        dtype: the type of the embeddings.
        is_of_positions: whether it replaces a table of positions, which may be called with the mask of all tokens so
            far in place of the ids of the last ones.
    """

    def __init__(self, width: int, dtype: torch.dtype, *, is_of_positions: bool = False) -> None:
        super().__init__()
        self.width, self._is_of_positions = width, is_of_positions
        self.blank = torch.zeros((), dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if self._is_of_positions or not tensors:  # such a table may also be called with a shape
            return self.blank.expand(1, 1, self.width)
        # Ids (B, T), or hidden states (B, T, D) of another width.
        return self.blank.expand(*tensors[0].shape[:2], self.width)


class HeadStub(nn.Module):
    """Replaces the head of another stage: returns logits of 0 positions, so what follows the head costs nothing.

    A model that takes the logits of one position of each row gets one number for each position.
    """

    def __init__(self, port: Port | None = None, *, has_positions: bool = False) -> None:
        super().__init__()
        self.port, self._has_positions = port, has_positions

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.port is not None:
            self.port.captured = hidden
        return hidden[..., :1] if self._has_positions else hidden[:, :0, :1]


STUBS = (PassThrough, EmbeddingStub, HeadStub)


def resemble(stub: nn.Module, replaced: nn.Module) -> None:
    """Give a stub the attributes that a model's forward or initialisation reads from the replaced module.

    These are the module's plain attributes, such as the type of a block's attention, and its own weights as tensors on
    the meta device, whose type is read.
    """
    for name, value in vars(replaced).items():
        if not name.startswith("_") and name not in vars(stub) and not isinstance(value, torch.Tensor):
            stub.__dict__[name] = value
    cls: Any = type(replaced)
    for name in _properties(cls):
        stub.__dict__[name] = getattr(replaced, name)
    for name, parameter in replaced.named_parameters(recurse=False):
        stub.__dict__[name] = parameter.data


@functools.cache
def _properties(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(name for name in dir(cls) if isinstance(getattr(cls, name), property) and not hasattr(nn.Module, name))


def admit(module: nn.Module, name: str, port: Port, *, is_entrance: bool) -> None:
    """Make `module` set its dropout seed before each call and, if `is_entrance`, use the received hidden states."""

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if port.seeds is not None:
            port.seeds.plant(name)
        if is_entrance and port.received is not None:
            return with_hidden(port.received, args, kwargs)
        return args, kwargs

    intercept(module, before)
