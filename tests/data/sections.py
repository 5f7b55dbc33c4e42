"""Corpora of data sections written as keyword arguments."""

from __future__ import annotations

from typing import Any

from hf_gpipe.data import build_corpus
from hf_gpipe.recipe import DataSection


def corpus(*, order_seed: int = 0, **keys: Any) -> Any:
    """The corpus of a data section with these keys."""
    return build_corpus(DataSection(**keys), order_seed)
