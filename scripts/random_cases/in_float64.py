"""Let a model compute all of its parts in float64, also those that it computes in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class InFloat64(TorchFunctionMode):
    """Leaves float64 tensors as they are where a model computes in float32, which rounds as the shapes do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.matmul and {args[0].dtype, args[1].dtype} == {torch.float32, torch.float64}:
            return args[0].double() @ args[1].double()  # with positions, which were integers: transformers 5.17
        if not kwargs and func not in _CONVERSIONS:
            return func(*args)
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            converts = func in _CONVERSIONS and torch.float32 in (*args, *kwargs.values())
            if func is torch.Tensor.float or converts:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


_CONVERSIONS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.float}


def _checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpoint a block in the mode above: when it runs again, or is compiled, torch has put every mode aside."""

    def run(*args: Any) -> Any:
        with InFloat64():
            return function(*args)

    return checkpoint(run, *args, **options)


@contextmanager
def in_float64() -> Iterator[None]:
    """Context manager with the mode above, also in what a backward runs again."""
    with InFloat64(), patch("hf_gpipe.adapters.stage_model.checkpoint", _checkpoint):
        yield
