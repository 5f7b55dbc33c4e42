"""Traces that are kept for the process, so that the same layers are traced once, however often they are planned.

A trace follows from the code and the values that it reads. `identity_of` collects them: the classes of all objects and
modules with their functions, the functions of the files in which modules are defined, and every attribute down to plain
values. Of a tensor it takes shape and type, since fake tensors have no values. An object that it does not know, such as
a function that refers to variables around it, has no identity, and its trace is not kept.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from hf_gpipe.libraries.torch import FakeTensor, OpOverload, OpOverloadPacket
from hf_gpipe.libraries.transformers import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS

#: Models whose traces are kept.
_MOST_MODELS = 64

_PLAIN = (bool, int, float, complex, str, bytes, type(None), types.EllipsisType)
_CONSTANTS = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum)
_CODE = (types.FunctionType, type)
_FUNCTIONS = (types.BuiltinFunctionType, OpOverload, OpOverloadPacket)
_PACKAGES = ("builtins", "collections", "functools", "types", "torch", "transformers", "peft", "hf_gpipe")
_HEAP_TYPE = 1 << 9


class _UnknownError(Exception):
    """A value has no identity, so two objects cannot be compared by it."""


_kept: OrderedDict[Hashable, dict[Hashable, Any]] = OrderedDict()


def kept_for(*values: Any) -> dict[Hashable, Any]:
    """The traces kept for models with these values. Values without an identity get an empty dict of their own."""
    identity = identity_of(*values)
    if identity is None:
        return {}
    traces = _kept.setdefault(identity, {})
    _kept.move_to_end(identity)
    while len(_kept) > _MOST_MODELS:
        _kept.popitem(last=False)
    return traces


def identity_of(*values: Any) -> Hashable | None:
    """The identity of values: equal where no trace can tell a difference. None: that is not known."""
    identity = _Identity()
    kernels = [tuple(dict(functions).items()) for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
    if not all(isinstance(kernel, types.FunctionType) and _is_known(kernel) for own in kernels for _, kernel in own):
        return None
    try:
        identities = tuple(map(identity.of, values))
    except _UnknownError:
        return None
    return (*identities, *identity.of_code(), *kernels, *_switches())


class _Identity:
    """Collects what values are made of. An object that is met again is told by its number."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []
        #: The classes of modules, in the order in which they are met.
        self._classes: dict[type, None] = {}

    def of(self, value: Any) -> Hashable:
        """The identity of any value. Raises _UnknownError where it has none."""
        cls = type(value)
        if cls in _PLAIN or isinstance(value, _CONSTANTS):
            return cls, value
        if not _is_known(value if isinstance(value, _CODE) else cls):
            raise _UnknownError
        if isinstance(value, type):
            return value
        if id(value) in self._met:
            return "met", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        self._alive.append(value)
        if cls in (list, tuple) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
            return cls, *map(self.of, value)
        if cls in (dict, OrderedDict, types.MappingProxyType):
            return cls, *((self.of(key), self.of(entry)) for key, entry in value.items())
        if cls in (set, frozenset):
            return cls, frozenset(map(self.of, value))
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if callable(value) and not isinstance(value, nn.Module) and (identity := self._of_function(value)) is not None:
            return identity
        if isinstance(value, nn.Module):
            self._classes[cls] = None
        return self._of_object(value)

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
            raise _UnknownError
        form = (type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        return form, self.of(vars(tensor)) if hasattr(tensor, "__dict__") else None

    def _of_function(self, function: Any) -> Hashable | None:
        """The identity of a function; None: it is an object that can be called."""
        if isinstance(function, types.MethodType):
            return "method", self.of(function.__func__), self.of(function.__self__)
        if isinstance(function, functools.partial):
            return "partial", self.of(function.func), self.of(function.args), self.of(function.keywords)
        if isinstance(function, types.FunctionType):
            return function, *(self.of(cell.cell_contents) for cell in function.__closure__ or ())
        return function if isinstance(function, _FUNCTIONS) else None

    def _of_object(self, value: Any) -> Hashable:
        """The identity of an object of pure Python: its class and its attributes, without what follows from others."""
        cls = type(value)
        bases = [base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE]
        has_slots = any(vars(base).get("__slots__") for base in cls.__mro__)
        if bases != [object] or has_slots or not hasattr(value, "__dict__"):
            raise _UnknownError
        derived = getattr(cls, "derived", ())
        attributes = {
            name: entry
            for name, entry in vars(value).items()
            if name not in derived and not isinstance(getattr(cls, name, None), functools.cached_property)
        }
        return cls, self.of(attributes)

    def of_code(self) -> list[Hashable]:
        """The functions of the classes of modules, and of the files that they are in; a program may exchange them."""
        classes = dict.fromkeys(base for cls in self._classes for base in cls.__mro__ if base is not object)
        files = dict.fromkeys(cls.__module__ for cls in classes)
        namespaces = [vars(cls) for cls in classes] + [vars(sys.modules[file]) for file in files if file in sys.modules]
        return [
            tuple((name, entry) for name, entry in names.items() if type(entry) in _PLAIN or isinstance(entry, _CODE))
            for names in map(dict, namespaces)
        ]


def _is_known(code: Any) -> bool:
    """Whether a class or a function reads nothing that `identity_of` overlooks; a user's own code may."""
    # A function that wraps another has the wrapped function's __module__.
    name = code.__globals__.get("__name__") if isinstance(code, types.FunctionType) else code.__module__
    return str(name).partition(".")[0] in _PACKAGES


def _switches() -> tuple[Hashable, ...]:
    """PyTorch's settings of the whole process."""
    asked: tuple[Callable[[], Hashable], ...] = (
        torch.get_default_dtype,
        torch.get_num_threads,
        torch.is_inference_mode_enabled,
        torch.is_grad_enabled,
        torch.are_deterministic_algorithms_enabled,
        functools.partial(torch.is_autocast_enabled, "cpu"),
        functools.partial(torch.get_autocast_dtype, "cpu"),
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
    )
    return tuple(ask() for ask in asked)
