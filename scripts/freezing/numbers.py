"""Losses, gradient norms, weights, likelihoods and tokens of small runs, one for each mode, loss and kind of model."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from scripts.freezing.results import Entries, Tolerance
from scripts.freezing.runs import RUNS, text_of
from tests.gloo import run_gloo

FILE = "numbers.txt"


def names() -> list[str]:
    """The names of all runs, in an order in which those of several processes are among the others."""
    return sorted(RUNS, key=lambda name: crc32(name.encode()))


def entries(wanted: Sequence[str]) -> Entries:
    """The texts of some runs."""
    return {name: _told(name) for name in wanted}


def _told(name: str) -> str:
    if RUNS[name].processes == 1:
        try:
            return text_of(name)
        except Exception as error:  # an error of a run is what the run does
            return f"{type(error).__name__}: {error}"
    texts = run_gloo(text_of, RUNS[name].processes, name)
    return texts[0] if len(set(texts)) == 1 else "\n".join(f"process {n}:\n{text}" for n, text in enumerate(texts))


def tolerance_of(name: str) -> Tolerance:
    """Other processors add up in another order.

    In float64 that is 1e-16 of a number, which some steps of training make some 1e-12. In float32, 4 bits and narrow
    messages it is 1e-7 and some 1e-5. In bfloat16 and float16 a rounding that goes the other way is 4e-3 of a value.
    """
    run = RUNS[name]
    if run.dtype == torch.bfloat16 or run.options.get("autocast") or run.options.get("boundary_dtype"):
        return Tolerance(2e-2, 1e-3)
    if run.dtype == torch.float32:
        return Tolerance(1e-3, 1e-5)
    return Tolerance(1e-9, 1e-11)
