"""The versions of a stage's weights while an asynchronous table runs (weight stashing, PipeDream, section 3.3).

Parameters stay the same objects, so gradients, optimizer state and hooks know nothing of versions: only the memory of a
parameter's values changes. If an action will still read the values that an update overwrites, the parameter first gets
a copy of them, and the old memory becomes the stash. Autograd graphs that keep views of the old memory stay correct,
and while the backward of a graph that keeps the parameter itself runs, the parameter has the stashed values. The memory
of a stash that no action reads any more is used for the next copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hf_gpipe.libraries.torch import keeping_versions

Values = list[torch.Tensor]


class Versions:
    """The newest version of a stage's weights, in its parameters, and the older ones that are still to be read.

    Args:
        parameters: the parameters of the stage. Parameters that are not trained have one version.

    Attributes:
        most_bytes: the most memory that stashes have held since `begin`, in bytes.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self._stashed: dict[int, Values] = {}
        self._free: list[Values] = []
        self._home: Values | None = None
        self._newest = 0
        self.most_bytes = 0

    def begin(self) -> None:
        """Before a window: the weights as they are become version 0."""
        self.end()
        self._home = [p.data for p in self._parameters]
        self._newest = self.most_bytes = 0

    @torch.no_grad()
    def end(self) -> None:
        """After a window: forget the stashes. The newest values move to where the weights were before it."""
        for parameter, values in zip(self._parameters, self._home or (), strict=False):
            if parameter.data_ptr() != values.data_ptr():
                parameter.data = values.copy_(parameter.data)
        self._home = None
        self._stashed.clear()
        self._free.clear()

    @contextmanager
    def reading(self, version: int, *, is_last: bool) -> Iterator[None]:
        """Context manager in which the parameters have the values of a version.

        Args:
            version: number of the newest version or of a stashed version.
            is_last: whether no action reads this version afterwards; its stash is then freed.
        """
        if version == self._newest:
            yield
            return
        newest = self._replace(self._stashed[version])
        try:
            yield
        finally:
            self._replace(newest)
            if is_last:
                self._free.append(self._stashed.pop(version))

    @contextmanager
    def updating(self, *, keeps: bool) -> Iterator[None]:
        """Context manager for an update, which makes the next version.

        Args:
            keeps: whether the version that it replaces is still to be read, so that it is stashed.
        """
        if keeps:
            self._stashed[self._newest] = self._replace(self._copies())
            stashed = sum(tensor.nbytes for values in self._stashed.values() for tensor in values)
            self.most_bytes = max(self.most_bytes, stashed)
        # Graphs that are alive have their own version in memory that nothing writes to; autograd cannot know that.
        with keeping_versions(self._parameters):
            yield
        self._newest += 1

    @torch.no_grad()
    def _copies(self) -> Values:
        if not self._free:
            return [p.detach().clone() for p in self._parameters]
        return [copy.copy_(p) for copy, p in zip(self._free.pop(), self._parameters, strict=True)]

    def _replace(self, values: Values) -> Values:
        """Give the parameters other values; returns those that they had."""
        replaced = [p.data for p in self._parameters]
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
        return replaced
