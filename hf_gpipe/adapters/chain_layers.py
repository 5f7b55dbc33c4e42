"""The layers of a torch module: the outermost modules that its forward calls one after the other.

A module without parameters belongs to the layer before it; if it is called several times, it is on every stage.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.observation.fake_operations import KnownOperations
from hf_gpipe.adapters.observation.observed import observe
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.torch import parts_of


def parts_of_sequential(model: nn.Module) -> tuple[Layer, ...]:
    """Return the layers of an nn.Sequential: its parts; a part that is an nn.Sequential is replaced by its own parts.

    A part that stands in several places is replaced by copies there, whose parameters are tied.
    """
    return _grouped(model, list(_parts(model, "", set())), set())


def _parts(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[str]:
    for name, part in parts_of(module).items():
        if part is None:
            continue
        if part in seen:
            kept: dict[int, Any] = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
            part = parts_of(module)[name] = copy.deepcopy(part, kept)
        seen.add(part)
        if type(part).forward is nn.Sequential.forward:
            yield from _parts(part, f"{prefix}{name}.", seen)
        else:
            yield f"{prefix}{name}"


def find_layers(model: nn.Module, forward: Callable[[], Any]) -> tuple[Layer, ...]:
    """Return the layers of any module, as many as form a chain.

    The modules that the model's own forward calls must form a chain. A module with lists of other modules is replaced
    by the modules that it calls, if they form a chain too.

    Args:
        model: the model, on the meta device or with fake tensors.
        forward: calls the model on such inputs, and returns its logits.

    Raises:
        UnsupportedModelError: the modules form no chain.
    """
    order = _calls(model, forward)
    repeated = {name for name, count in Counter(order).items() if count > 1}

    def called_by(name: str) -> list[str]:
        inner = [other for other in dict.fromkeys(order) if other.startswith(f"{name}." if name else "") and other]
        return [other for other in inner if not any(other.startswith(f"{outer}.") for outer in inner)]

    done: list[str] = []
    ahead = called_by("")
    layers = _grouped(model, ahead, repeated)
    observe(model, layers, forward)
    while ahead:
        name = ahead.pop(0)
        inner = called_by(name)
        parts = model.get_submodule(name).modules()
        has_lists = any(isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential) for part in parts)
        if inner and (has_lists or not (done or ahead)):
            with suppress(UnsupportedModelError):
                finer = _grouped(model, [*done, *inner, *ahead], repeated)
                observe(model, finer, forward)
                layers, ahead = finer, [*inner, *ahead]
                continue
        done.append(name)
    return layers


def _calls(model: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """Return the names of all modules that a forward calls, in order."""
    order: list[str] = []

    def note(name: str, *_: Any) -> None:
        order.append(name)

    handles = [part.register_forward_pre_hook(partial(note, name)) for name, part in model.named_modules()]
    try:
        with KnownOperations():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return order


def _grouped(model: nn.Module, names: Sequence[str], repeated: set[str]) -> tuple[Layer, ...]:
    """Group modules, which are called in this order, into layers."""
    groups: list[tuple[str, list[str]]] = []
    first: list[str] = []
    for name in names:
        if any(True for _ in model.get_submodule(name).parameters()):
            groups.append((name, [*first, name]))
            first = []
        elif name not in repeated:
            (groups[-1][1] if groups else first).append(name)
    if not groups:
        raise UnsupportedModelError(f"{type(model).__name__} calls no module that has parameters, so it has no layers")
    return tuple(Layer(name, "block", "decoder", tuple(modules)) for name, modules in groups)
