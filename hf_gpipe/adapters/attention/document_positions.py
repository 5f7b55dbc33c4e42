"""Positions that begin anew with each document of a packed row, where the model numbers the tokens itself.

A decoder-only model takes position ids. The tables of an encoder-decoder get the ids of a row, or only its shape, and
number its tokens. In a packed row such a table is called once for each document, as if the document were alone: so a
row may be longer than the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters.layers import StackName
from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.stubs import Port


def is_position_table(module: str) -> bool:
    """Whether a module of a stack, by its name, makes positions."""
    own = module.rpartition(".")[2]
    return "position" in own or own == "wpe"


def number_anew(table: nn.Module, stack: StackName, port: Port) -> None:
    """Let a table of a stack number the tokens of each document from its beginning. Call it once per module."""
    table._port, table._stack = port, stack  # type: ignore[assignment]
    extend_class(table, _NumbersAnew)


class _NumbersAnew:
    """Mixed into the class of a table of positions: see `number_anew`."""

    _port: Port
    _stack: StackName

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]  # the table's own class follows in the MRO
        if (lengths := self._port.lengths.get(self._stack)) is None:
            return call(*args, **kwargs)
        alone, start = [], 0
        for length in lengths:
            of_document = {
                # The model has numbered the row from 0.
                name: value[..., :length] if name == "position_ids" else _part(value, start, length)
                for name, value in kwargs.items()
            }
            alone.append(call(*(_part(value, start, length) for value in args), **of_document))
            start += length
        return torch.cat(alone, dim=-2)


def _part(value: Any, start: int, length: int) -> Any:
    """A document's part of ids (1, T), of embeddings (1, T, D), or of a shape (1, T, ...)."""
    if isinstance(value, torch.Tensor):
        return value[:, start : start + length]
    return torch.Size((value[0], length, *value[2:])) if isinstance(value, tuple) else value
