"""The entries of text: token ids, their mask and labels, of a mini-batch or of one row, under transformers' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDS, MASK = "input_ids", "attention_mask"


def text_entries(ids: Any, mask: Any = None, labels: Any = None) -> dict[str, Any]:
    """The entries with these values: tensors (N, T) of a mini-batch, or tensors (T,) or lists of a row. None: no such
    entry."""
    entries = {IDS: ids, MASK: mask, "labels": labels}
    return {name: values for name, values in entries.items() if values is not None}


def token_ids(entries: Mapping[str, Any]) -> Any:
    """Return the token ids; of a model with an encoder, the ids of the sources."""
    return entries[IDS]


def has_ids(row: Any) -> bool:
    """Whether a row of a dataset has token ids."""
    return isinstance(row, Mapping) and IDS in row
