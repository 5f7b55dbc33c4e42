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


class _Layer:
    """Mixed into the class of each module that starts one of the stage's own layers: see `admit`."""

    _port: Port
    _layer_name: str
    _is_entrance: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        port = self._port
        if port.seeds is not None:
            port.seeds.plant(self._layer_name)
        if self._is_entrance and port.received is not None:
            where = _hidden_argument(args, kwargs)
            if where is None:
                args = (port.received, *args[1:])
            else:
                kwargs[where] = port.received
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the module's own class follows in the MRO


def admit(module: nn.Module, name: str, port: Port, *, is_entrance: bool) -> None:
    """Make `module` plant its dropout seed when it is called and, if it is the entrance, take the received states.

    The class of the one instance is extended rather than a hook registered: a hook runs again when a block is
    recomputed (transformers 5.17 checkpoints `__call__`), this runs once a forward on every version. Names of
    parameters, `isinstance` and the class's own name stay as they were.
    """
    cls = type(module)
    module._port, module._layer_name, module._is_entrance = port, name, is_entrance  # type: ignore[assignment]
    module.__class__ = type(cls.__name__, (_Layer, cls), {"__module__": cls.__module__})
