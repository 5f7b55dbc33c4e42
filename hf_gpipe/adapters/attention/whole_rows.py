"""Rotary embeddings of a part of a row, whose frequencies follow from the length of the whole row.

Dynamic NTK and LongRoPE choose frequencies by the last position that they are given. A part ends before the row does,
so the last position of the row is added to the part's positions, and its angles are left out of the result.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.stubs import Port
from hf_gpipe.libraries.torch import tree_map_only

_POSITIONS = "position_ids"


def read_whole_rows(module: nn.Module, port: Port) -> None:
    """Let a module that reads positions know the last one of the row. Call it once per module."""
    if _POSITIONS in (names := [*inspect.signature(module.forward).parameters]):
        module._port, module._place = port, names.index(_POSITIONS)  # type: ignore[assignment]
        extend_class(module, _ReadsWholeRows)


class _ReadsWholeRows:
    """Mixed into the class of a module: see `read_whole_rows`."""

    _port: Port
    _place: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]  # the module's own class follows in the MRO
        if (length := self._port.row_length) is None:
            return call(*args, **kwargs)
        given = dict(enumerate(args)) | kwargs
        name: int | str = _POSITIONS if _POSITIONS in kwargs else self._place
        positions = given[name]
        last = torch.full_like(positions[..., :1], length - 1)
        given[name] = torch.cat([positions, last], dim=-1)
        output = call(*(given[i] for i in range(len(args))), **{n: given[n] for n in kwargs})
        return tree_map_only(torch.Tensor, lambda angles: angles[..., :-1, :], output)
