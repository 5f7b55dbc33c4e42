"""What stands in a stage's model where layers of other stages were, and how tensors enter and leave it.

A stage is the Hugging Face model itself: its own layers are real and its own forward runs, so masks, rotary
embeddings and every family's arithmetic between the layers come from the library, unchanged. Layers of other
stages are replaced by the parameter-free stubs below. Two tensors cross this file for each forward:

* the received hidden states take the place of the input of the stage's first layer (`admit`), and
* the input of the first layer that belongs to the next stage is what the stage sends (`PassThrough`).

So a hidden state leaves and enters at the same point, the input of a layer, and whatever the family computes
between two layers runs exactly once, on the sender.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters.dropout import DropoutSeeds
from hf_gpipe.adapters.intercept import intercept


class Port:
    """Where the hidden states of one forward enter and leave a stage's model.

    It holds tensors only while `StageModel.__call__` runs. Nothing reads it during backward: the entrance sits
    outside the region that a block's activation checkpointing runs again, so a recomputation never meets another
    micro-batch's tensors.
    """

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None
        self.captured: torch.Tensor | None = None
        self.seeds: DropoutSeeds | None = None

    def close(self) -> None:
        self.received = self.captured = self.seeds = None


class PassThrough(nn.Module):
    """Stands for a block or a norm of another stage: returns its input, and records it where the stage ends.

    Args:
        port: where the input is recorded; None: nowhere.
        num_outputs: length of the tuple in which the hidden states are returned, first; None: they come alone.
    """

    def __init__(self, port: Port | None = None, num_outputs: int | None = None) -> None:
        super().__init__()
        self.port = port
        self.num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        where = _hidden_argument(args, kwargs)
        hidden = args[0] if where is None else kwargs[where]
        if self.port is not None:
            self.port.captured = hidden
        return hidden if self.num_outputs is None else (hidden, *[None] * (self.num_outputs - 1))


class EmbeddingStub(nn.Module):
    """Stands for an embedding or its projection on another stage: zeros of the right shape that take no memory.

    The model still derives positions and masks from the ids it is given; the zeros themselves never reach a layer.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.zero = torch.zeros((), dtype=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors:  # positions, made from a shape
            return self.zero.expand(1, 1, self.width)
        # Ids (B, T), or hidden states (B, T, D) of another width.
        return self.zero.expand(*tensors[0].shape[:2], self.width)


class HeadStub(nn.Module):
    """Stands for the head of another stage: logits of no position, so that what follows the head costs nothing."""

    def __init__(self, port: Port | None = None) -> None:
        super().__init__()
        self.port = port

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.port is not None:
            self.port.captured = hidden
        return hidden[:, :0, :1]


def resemble(stub: nn.Module, replaced: nn.Module) -> None:
    """Give a stub what a model's forward or initialisation reads off the module that it stands for.

    That is the module's plain attributes, such as the kind of a block, and its own weights as tensors on the meta
    device, whose type is asked for.
    """
    for name, value in vars(replaced).items():
        if not name.startswith("_") and name not in vars(stub) and not isinstance(value, torch.Tensor):
            stub.__dict__[name] = value
    for name in dir(type(replaced)):
        if isinstance(getattr(type(replaced), name), property) and not hasattr(nn.Module, name):
            stub.__dict__[name] = getattr(replaced, name)
    for name, parameter in replaced.named_parameters(recurse=False):
        stub.__dict__[name] = parameter.data


def _hidden_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The keyword under which a layer is given its hidden states; None: they are its first positional argument."""
    if args:
        return None
    return next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))


def admit(module: nn.Module, name: str, port: Port, *, is_entrance: bool) -> None:
    """Make `module` plant its dropout seed when it is called and, if it is the entrance, take the received states."""

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if port.seeds is not None:
            port.seeds.plant(name)
        if is_entrance and port.received is not None:
            where = _hidden_argument(args, kwargs)
            if where is None:
                return (port.received, *args[1:]), kwargs
            kwargs[where] = port.received
        return args, kwargs

    intercept(module, before)
