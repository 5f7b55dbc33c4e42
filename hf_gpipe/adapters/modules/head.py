"""Deferred logits: a forward that stops before the head's projection to the vocabulary, which is computed later.

Logits (B, T, V) are the largest tensor of most models. In training the projection, a linear layer, keeps its input and
returns a stand-in without positions. The model's own forward goes on with it, and every operation on it is recorded:
the soft cap of Gemma 2, the scale of Cohere, the bias of Marian. Later the projection and these operations are run on
as many positions at a time as memory allows (runtime/head.py).

This works where the projection is a plain linear layer and the operations treat every position by itself.
`find_projection` makes sure of it on the tiny clone; of other models the logits are made whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.parts.cuts import VocabularyPart
from hf_gpipe.errors import one_line
from hf_gpipe.libraries.torch import tree_leaves, tree_map, version_of

#: Largest difference between logits made in parts and whole logits, as a share of the largest logit.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.05


class _NotByPositionError(Exception):
    """The model does something with its logits that cannot be done later, some positions at a time."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a recorded tensor among the arguments of an operation."""

    number: int


class DeferredLogits(TorchFunctionMode):
    """The logits of one forward before they are computed.

    Attributes:
        projection: a linear layer from D to V.
        autocast_dtype: type in which autocast lets the projection compute; None: no autocast.
        dtype: the type of the logits.
        vocabulary: the part of the vocabulary whose logits the projection makes; None: the whole vocabulary.
    """

    projection: nn.Linear
    autocast_dtype: torch.dtype | None
    dtype: torch.dtype

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary: VocabularyPart | None = None
        self._hidden: torch.Tensor | None = None
        #: The recorded operations: a function with its positional and keyword arguments.
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._slots: dict[int, _Slot] = {}
        self._stand_ins: list[torch.Tensor] = []
        self._result: _Slot | None = None
        self._is_open = False

    def begin(self, projection: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Record from here on; returns the stand-in for the projection's output."""
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        self._hidden, self.projection = hidden, projection
        self.vocabulary = getattr(projection, "vocabulary", None)
        self.autocast_dtype = torch.get_autocast_dtype(device) if is_autocast else None
        shape = (*hidden.shape[:-2], 0, projection.out_features)
        stand_in = hidden.new_empty(shape, dtype=self.autocast_dtype or hidden.dtype)
        self._note(stand_in)
        self._is_open = True
        self.__enter__()
        return stand_in

    def end(self, logits: torch.Tensor | None = None) -> None:
        """Stop recording. `logits` is what the model's forward returned; None after an error."""
        if self._is_open:
            self._is_open = False
            self.__exit__(None, None, None)
        if logits is not None:
            self._result = self._slots.get(id(logits))
            if self._result is None:
                raise _NotByPositionError("its logits are not made of what its projection returns alone")
            self.dtype = logits.dtype
        self._slots.clear()
        self._stand_ins.clear()

    def take_hidden(self) -> torch.Tensor:
        """Return the projection's input, (B, T, D), in the graph of the stage, and drop it here."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "the hidden states were taken before"
        return hidden

    @property
    def is_projection_alone(self) -> bool:
        """Whether the projection's output is the logits."""
        return self._result == _Slot(0)

    def finish(self, projected: torch.Tensor) -> torch.Tensor:
        """The logits (1, N, V) of any N positions from the projection's output for them, (1, N, V)."""
        values = [projected]

        def value(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, _Slot) else argument

        with self._autocast(projected.device):
            for function, recorded, named in self._operations:
                args, kwargs = tree_map(value, (recorded, named))
                values.append(function(*args, **kwargs))
        assert self._result is not None, "the forward has not ended"
        return values[self._result.number]

    def _autocast(self, device: torch.device) -> AbstractContextManager[object]:
        is_on = self.autocast_dtype is not None
        return torch.autocast(device.type, self.autocast_dtype, enabled=is_on, cache_enabled=False)

    def _note(self, tensor: torch.Tensor) -> None:
        self._slots[id(tensor)] = _Slot(len(self._stand_ins))
        self._stand_ins.append(tensor)  # its id is its own as long as it lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = sum(version_of(tensor) for tensor in tensors)
        result = func(*args, **kwargs)
        others = [tensor for tensor in tensors if id(tensor) not in self._slots]
        if len(others) == len(tensors):
            return result
        name = getattr(func, "__name__", str(func))
        if not isinstance(result, torch.Tensor):
            if name == "__setitem__" or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                raise _NotByPositionError(f"it calls {name} on its logits")
            return result  # such as a type or a device
        if id(result) in self._slots:
            if sum(version_of(tensor) for tensor in tensors) != before:
                raise _NotByPositionError(f"it changes its logits in place, by {name}")
            return result  # as `contiguous` does
        if "dropout" in name:
            raise _NotByPositionError(f"it calls {name} on its logits")
        if any(other.requires_grad for other in others):
            raise _NotByPositionError("its logits depend on a trained tensor beside its projection")

        def slot(argument: Any) -> Any:
            return self._slots.get(id(argument), argument) if isinstance(argument, torch.Tensor) else argument

        self._operations.append((func, *tree_map(slot, (args, kwargs))))
        self._note(result)
        return result


class _Deferring:
    """Mixed into the class of the projection: in a forward that defers the logits it does not compute."""

    _deferred: DeferredLogits | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._deferred is None:
            projected: torch.Tensor = super().forward(hidden)  # type: ignore[misc]  # nn.Linear follows in the MRO
            return projected
        return self._deferred.begin(self, hidden)  # type: ignore[arg-type]


class Projection:
    """The projection of a model's head, ready to be deferred.

    Args:
        linears: the linear layer, or several of which a forward calls one; their classes are extended.
    """

    def __init__(self, *linears: Any) -> None:
        self._linears = linears
        for linear in linears:
            linear._deferred = None
            extend_class(linear, _Deferring)

    def run(self, forward: Callable[[], Any], deferred: DeferredLogits) -> Any:
        """Run a forward whose result has the logits under "logits"; there they are left out."""
        self._defer(deferred)
        try:
            outputs = dict(forward())
            deferred.end(outputs.pop("logits"))
            return outputs
        finally:
            self._defer(None)
            deferred.end()

    def _defer(self, deferred: DeferredLogits | None) -> None:
        for linear in self._linears:
            linear._deferred = deferred


@dataclass(frozen=True)
class FoundProjection:
    """The name of the projection in the model, or the reason why its logits are made whole.

    Where PEFT trains a copy of the head, there are two names: the copy's and the original's, which computes without
    adapters.
    """

    names: tuple[str, ...]
    reason: str = ""


def find_projection(
    model: PreTrainedModel, head: str, entered: Mapping[str, list[int]], logits: Any, forward: Callable[[], Any]
) -> FoundProjection:
    """Find the projection of a tiny model, and compare logits made in parts with whole ones.

    Args:
        model: the tiny model. Its projection is changed for good.
        head: the name of the model's last layer.
        entered: the times at which each module was called in a forward, by its name.
        logits: the logits (B, T, V) that this forward returned.
        forward: runs the same forward again.
    """
    inside = [name for name, times in entered.items() if f"{name}.".startswith(f"{head}.") and len(times) == 1]
    linear = [name for name in inside if type(model.get_submodule(name)).forward is nn.Linear.forward]
    if not linear:
        return FoundProjection((), f"its head is a {type(model.get_submodule(head)).__name__}, not a linear layer")
    name = max(linear, key=lambda candidate: entered[candidate][0])
    deferred = DeferredLogits()
    try:
        Projection(model.get_submodule(name)).run(forward, deferred)
        in_parts = _in_parts(deferred)
    except (MemoryError, torch.OutOfMemoryError):
        raise  # of this process, which must not compute otherwise than the others
    except Exception as error:
        reason = str(error) if isinstance(error, _NotByPositionError) else f"{type(error).__name__}: {error}"
        return FoundProjection((), one_line(reason, 200))
    whole = logits.detach().flatten(0, -2)
    if in_parts.shape != whole.shape or in_parts.dtype != whole.dtype:
        return FoundProjection((), "its logits made in parts have another shape or type")
    difference = float((in_parts - whole).abs().max()) / max(float(whole.abs().max()), 1e-30)
    if not difference <= _TOLERANCES.get(whole.dtype, _HALF_TOLERANCE):
        return FoundProjection((), f"its logits made in parts differ by {difference:.0e}")
    return FoundProjection((name,))


@torch.no_grad()
def _in_parts(deferred: DeferredLogits) -> torch.Tensor:
    """The logits (B * T, V), made in two parts of different size that do not end with a row."""
    hidden = deferred.take_hidden().flatten(0, -2)
    linear, dtype = deferred.projection, deferred.autocast_dtype or hidden.dtype
    bias = None if linear.bias is None else linear.bias.to(dtype)
    parts = [F.linear(part.to(dtype), linear.weight.to(dtype), bias) for part in hidden.split(len(hidden) // 2 + 1)]
    return torch.cat([deferred.finish(part[None])[0] for part in parts])
