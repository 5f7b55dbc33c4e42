"""How many bytes of activations are kept for backward, counted while a step runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


class _Saved:
    """A tensor that autograd keeps; it goes when the node that keeps it lets go of its graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Counts storages that are kept, each once however many tensors lie in it, and remembers the largest sum.

    Args:
        excluded: tensors whose storages do not count: parameters, and what exists without the step.
    """

    def __init__(self, excluded: Iterable[torch.Tensor]) -> None:
        self.peak_bytes = self._live_bytes = 0
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._holders: Counter[int] = Counter()

    def hold(self, tensor: torch.Tensor, holder: object) -> None:
        """Count a tensor's storage for as long as `holder` lives."""
        address, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if address in self._excluded:
            return
        self._holders[address] += 1
        if self._holders[address] == 1:
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(holder, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._live_bytes -= size

    def counting(self) -> AbstractContextManager[None]:
        """Context manager that counts what autograd saves inside."""

        def pack(tensor: torch.Tensor) -> _Saved:
            # Detached: a node that saved its own output would otherwise hold itself for ever.
            saved = _Saved(tensor.detach())
            self.hold(tensor, saved)
            return saved

        hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor)
        return hooks
