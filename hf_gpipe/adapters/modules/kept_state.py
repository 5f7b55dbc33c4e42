"""State that modules keep from one forward to the next, besides their weights, and how it is put back.

The frequencies of dynamic NTK rotary embeddings, for example, follow the longest row that any earlier forward read, and
NLLB-MoE's routers keep the capacity of the last evaluation. A stage runs many micro-batches, and some of them twice, so
its forwards would depend on their order. Each forward of a stage therefore begins with what its modules kept when the
model was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_gpipe.libraries.torch import buffers_of, version_of
from hf_gpipe.libraries.transformers import CAPTURES_OUTPUTS

Kept = Mapping[str, frozenset[str]]
"""The names of attributes and buffers, by the name of their module's class."""


class _Value(NamedTuple):
    """An attribute at one time; `own` is a copy where a forward may change the value in place."""

    value: Any
    own: Any
    is_buffer: bool


class KeptState:
    """The attributes and buffers of a model's modules, as they are when this object is made.

    Args:
        model: the model.
        kept: the attributes that `restore` puts back; None: all.
    """

    def __init__(self, model: nn.Module, kept: Kept | None = None) -> None:
        self._noted: list[tuple[nn.Module, frozenset[str] | None, dict[str, _Value]]] = []
        for module in model.modules():
            names = None if kept is None else kept.get(type(module).__name__)
            if kept is None or names:
                self._noted.append((module, names, _values(module, names)))

    def __bool__(self) -> bool:
        """Whether a module keeps anything."""
        return bool(self._noted)

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module, _, _ in self._noted]

    @torch.no_grad()
    def restore(self, within: nn.Module | None = None) -> None:
        """Put back what the modules kept, on the host without a wait for the device.

        Args:
            within: the module in which it is put back; None: the whole model.
        """
        inside = None if within is None else {id(module) for module in within.modules()}
        for module, names, noted in self._noted:
            if inside is None or id(module) in inside:
                for name in _present(module).keys() | noted.keys() if names is None else names:
                    _put(module, name, noted.get(name))

    def unlike(self, other: KeptState) -> dict[str, frozenset[str]]:
        """The attributes whose values differ from those in another object of the same model."""
        found: dict[str, set[str]] = {}
        for (module, _, ours), (_, _, theirs) in zip(self._noted, other._noted, strict=True):
            odd = {n for n in ours.keys() | theirs.keys() if not _equal(ours.get(n), theirs.get(n))}
            if odd:
                found.setdefault(type(module).__name__, set()).update(odd)
        return {name: frozenset(odd) for name, odd in found.items()}


def observe_kept(model: nn.Module, forwards: tuple[Callable[[], Any], Callable[[], Any]]) -> Kept:
    """Find the attributes that depend on which forwards a model has run.

    What every forward leaves alike, such as a table that the first one makes, is no state. The model is left as it was.

    Args:
        model: the model.
        forwards: functions that run the model on a long input and on a short one.
    """
    new, after = KeptState(model), []
    long, short = forwards
    for order in ((long,), (long, long), (short,)):
        for forward in order:
            forward()
        after.append(KeptState(model))
        new.restore()
    found = [after[0].unlike(other) for other in after[1:]]
    return {name: frozenset().union(*(f.get(name, ()) for f in found)) for f in found for name in f}


#: The attributes that every module has, which belong to torch; and a mark without which a second forward would put
#: transformers' hooks into a model again, so that they capture everything twice.
_NO_STATE = frozenset({*vars(nn.Module()), CAPTURES_OUTPUTS})


def _present(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in vars(module).items() if n not in _NO_STATE} | buffers_of(module)


def _values(module: nn.Module, names: frozenset[str] | None) -> dict[str, _Value]:
    present = _present(module)
    return {
        name: _Value(value, _copied(value), name in buffers_of(module))
        for name, value in present.items()
        if names is None or name in names
    }


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), version_of(value)
    return copy(value) if isinstance(value, list | dict | set) else value


def _put(module: nn.Module, name: str, noted: _Value | None) -> None:
    """Give an attribute or a buffer its value; None: there was none."""
    if noted is None or not noted.is_buffer:
        buffers_of(module).pop(name, None)
    if noted is None or noted.is_buffer:
        vars(module).pop(name, None)
    if noted is None:
        return
    value = noted.value
    if isinstance(value, torch.Tensor):
        # The tensor itself, whose address a compiled forward may have; a forward may have written into it.
        own, version = noted.own
        if version_of(value) != version:
            value.detach().copy_(own)
    elif isinstance(value, list | dict | set):
        value = copy(noted.own)
    (buffers_of(module) if noted.is_buffer else vars(module))[name] = value


def _equal(one: _Value | None, other: _Value | None) -> bool:
    if one is None or other is None or one.is_buffer != other.is_buffer:
        return one is other
    if isinstance(one.value, torch.Tensor) and isinstance(other.value, torch.Tensor):
        ours, theirs = one.own[0], other.own[0]
        return (one.value is other.value and one.own[1] == other.own[1]) or (
            (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype) and torch.equal(ours, theirs)
        )
    try:
        return one.own is other.own or bool(one.own == other.own)
    except Exception:  # such as an array of several truth values
        return False
