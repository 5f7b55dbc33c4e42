"""Liger's kernels in the layers of a stage: fused norms, rotary embeddings and feed-forwards (arXiv 2410.10989).

liger-kernel changes the modules of a whole model, and names that all models of the family share. So it changes a copy
of the model here, and what it has changed is noted by the names of modules, and undone where it is shared. A stage puts
on its own modules what was noted. Models without kernels, such as the clones of checks, stay as they are.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.errors import UserError

#: Name of a module -> its class, and the attributes that its kernel needs, such as `forward`.
Kernels = Mapping[str, tuple[type, Mapping[str, Any]]]


def check_available(family: str, device: torch.device) -> None:
    """Raise UserError where liger-kernel is not installed, has no kernels for the family, or cannot run them."""
    if find_spec("liger_kernel") is None:
        raise UserError(
            "use_liger_kernel is true and the package liger-kernel is not installed: pip install liger-kernel, or "
            "leave use_liger_kernel out"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            "use_liger_kernel is true and the stages run on the CPU, for which liger-kernel has no kernels; leave "
            "use_liger_kernel out, or use device: cuda"
        )
    from hf_gpipe.libraries.liger import families

    if family not in families():
        raise UserError(
            f"use_liger_kernel is true and liger-kernel has no kernels for {family!r}, only for "
            f"{', '.join(families())}; leave use_liger_kernel out"
        )


def kernels_of(reference: PreTrainedModel) -> Kernels:
    """The kernels that liger-kernel has for a model's modules.

    Args:
        reference: the whole model, of a family that has kernels. It stays as it is.
    """
    from hf_gpipe.libraries.liger import apply_kernels

    changed = copy.deepcopy(reference)
    with _undone(changed) as functions:
        apply_kernels(changed)
    found = {}
    for name, module in changed.named_modules():
        plain = reference.get_submodule(name)
        # Experts keep the products of the library, of all experts at once.
        if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
            continue
        attributes = {key: value for key, value in vars(module).items() if key not in vars(plain)}
        shared = functions.get(type(plain).__module__, {})
        forward: Any = type(plain).forward
        if "forward" not in attributes and shared.keys() & set(inspect.unwrap(forward).__code__.co_names):
            attributes["forward"] = MethodType(_with_globals(forward, shared), module)
        if "forward" in attributes:
            found[name] = type(plain), attributes
    return found


def put_kernels(kernels: Kernels, layers: Mapping[str, nn.Module]) -> None:
    """Let the modules inside of a stage's layers, by the layers' names, run their kernels from now on.

    A module that peft has replaced stays as it is.
    """
    for layer, root in layers.items():
        for inner, module in root.named_modules():
            cls, attributes = kernels.get(".".join(filter(None, (layer, inner))), (None, {}))
            if cls is not None and isinstance(module, cls):
                for key, value in attributes.items():
                    setattr(module, key, MethodType(value.__func__, module) if isinstance(value, MethodType) else value)


@contextmanager
def _undone(model: PreTrainedModel) -> Iterator[dict[str, dict[str, Any]]]:
    """Context manager after which the modules with the code of a model have their names' values of before again.

    It fills what it gives: by the name of such a module, the functions that had been put into it.
    """
    names = {type(module).__module__ for module in model.modules()}
    before = {name: dict(vars(sys.modules[name])) for name in names if name.startswith("transformers.models.")}
    functions: dict[str, dict[str, Any]] = {}
    try:
        yield functions
    finally:
        for name, values in before.items():
            now = vars(sys.modules[name])
            new = {key: value for key, value in now.items() if value is not values.get(key)}
            functions[name] = {key: value for key, value in new.items() if isinstance(value, FunctionType)}
            now.update(values)


def _with_globals(function: FunctionType, values: Mapping[str, Any]) -> FunctionType:
    """A copy of a function, or of one that decorators have wrapped, that sees other values of global names."""
    seen, cells, inner = (
        {**function.__globals__, **values},
        function.__closure__,
        getattr(function, "__wrapped__", None),
    )
    if inner is not None:  # transformers 5.24 wraps the forward of attention
        own = _with_globals(inner, values)
        cells = tuple(CellType(own) if cell.cell_contents is inner else cell for cell in cells or ())
    made = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
