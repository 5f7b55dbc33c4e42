"""Weights of a time before, which can stand in for the present ones: a reference in memory, without a second model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_gpipe.model.stage_parameters import StageParameters


class KeptWeights:
    """A copy of the trained weights of this process's stages, as they are when it is made. The others do not change.

    Every process makes it, and calls its methods.

    Args:
        parameters: of the stages; trained ones do not visit the device.
    """

    def __init__(self, parameters: StageParameters) -> None:
        self._parameters = parameters
        parameters.ties.refresh_copies()
        trained = {p: None for model in parameters.models.values() for p in model.parameters.values()}
        self._values = {p: p.detach().clone() for p in trained if p.requires_grad}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which the stages have the kept weights. No tensor is copied."""
        # Here, for copies of a tied weight may be refreshed once only, and the kept ones are fresh.
        self._parameters.ties.refresh_copies()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def mix(self, share: float) -> None:
        """Move the kept weights by a share of the way to the present ones."""
        self._parameters.ties.refresh_copies()
        for parameter, kept in self._values.items():
            kept.lerp_(parameter.detach(), share)

    def _exchange(self) -> None:
        for parameter, kept in self._values.items():
            self._values[parameter], parameter.data = parameter.data, kept
        for model in self._parameters.every_model:
            if model.weight_gradients is not None:
                model.weight_gradients.forget()
