"""The ways to run the stages of a model that are compared on a tiny clone, and who compares them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.model.spec import ModelSpec


@dataclass(frozen=True)
class Variant:
    """A way to run a tiny clone in stages, all of them in this process.

    Attributes:
        stages: the number of stages, or as many as there are layers; None: one for each layer.
        recompute: "stage", "block" or "none".
        splits_backward: whether the gradients of inputs and of weights are computed apart (I and W).
        packing: whether the rows of a micro-batch are packed into one.
        ranks: the number of ranks among which layers are divided.
        kernels: the device on which layers have liger's kernels; None: they have none.
        generates: whether it generates; it does not train then.
    """

    stages: int | None = 3
    recompute: str = "stage"
    splits_backward: bool = False
    packing: bool = False
    ranks: int = 1
    kernels: torch.device | None = None
    generates: bool = False


class ModeVariant(Variant, ABC):
    """A way of a mode to run the clone with more keys of its pipeline; the mode says how it is compared. Errors have
    the key that asks for it, and why a clone may differ."""

    keys: ClassVar[Mapping[str, Any]]
    setting: ClassVar[str]
    cause: ClassVar[str]

    @abstractmethod
    def differs(self, adapter: TextAdapter) -> float:
        """How far a step of a tiny clone is from that of the plain clone, of the norm of the gradient."""

    def compared(self, adapter: TextAdapter, what: str) -> None:
        """Called where the clone does not differ; `what` names the comparison, as for `compared_once`."""


class Probe(Protocol):
    """Says whether a model can be run as it is asked for. A pipeline gets one, and asks it."""

    def open(self, spec: ModelSpec, device: torch.device) -> Adapter:
        """Read and check a model that reads text, without its weights. Raises UserError where it is not supported."""

    def require(self, adapter: Adapter, variant: Variant) -> None:
        """Raise UserError where the model computes something else when it is run so."""


class Trust:
    """The probe of a tiny clone's own pipeline, of which nothing is compared.

    Args:
        adapter: of the clone.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def open(self, spec: ModelSpec, device: torch.device) -> Adapter:
        return self._adapter

    def require(self, adapter: Adapter, variant: Variant) -> None:
        """It is what is compared."""
