"""Functions that run before and after each call of a transformers module.

The class of this one module is extended. A hook does not suffice: transformers runs a block again when its activations
are recomputed, and which method it runs again depends on the version (5.17 checkpoints `__call__`, 5.23 `forward`), so
a hook may run twice. The functions here run once per forward on every version, outside of the recomputed part and of
the part that torch.compile compiles. Names of parameters, `isinstance` and the name of the class stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

Before = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""(args, kwargs) of a call -> the (args, kwargs) that the module gets."""
After = Callable[[Any], Any]
"""Output of the module -> the output that the caller gets."""


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden states that a layer gets: its first argument, or the first tensor among its keywords, if any."""
    return args[0] if args else next((value for value in kwargs.values() if isinstance(value, torch.Tensor)), None)


def with_hidden(hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    where = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, where: hidden}


def intercept(module: nn.Module, before: Before | None = None, after: After | None = None) -> None:
    """Let `before` change the arguments of every call of `module`, and `after` its output. Call it once per module."""
    module._before, module._after = before, after  # type: ignore[assignment]
    extend_class(module, _Intercepted)


def extend_class(module: nn.Module, mixin: type) -> None:
    """Extend the class of this one module: attributes of `mixin` come before those of the class."""
    cls: type = type(module)
    module.__class__ = _extended(cls, mixin)


@cache
def _extended(cls: type, mixin: type) -> type:
    # One extended class per class: torch.compile compiles once per class.
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


class _Intercepted:
    """Mixed into the class of a module: see `intercept`."""

    _before: Before | None
    _after: After | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            args, kwargs = self._before(args, kwargs)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]  # the module's own class follows in the MRO
        return output if self._after is None else self._after(output)
