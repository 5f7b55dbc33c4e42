"""A model beside the trained one, in stages of the same numbers. It is of a mode, which says whether the two fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.registry import parts_of_modes


@dataclass(frozen=True)
class Companion:
    """A model beside the trained one, of a mode."""

    mode: str
    spec: ModelSpec

    def opened(self, trained: Adapter, open_one: Callable[[ModelSpec], Adapter]) -> OpenCompanion:
        """Open it by `open_one`, which reads and checks a model. Raises UserError where it does not fit the other."""
        adapter = parts_of_modes("companion")[self.mode].open_model(self.spec, trained, open_one)
        return OpenCompanion(self.mode, self.spec, adapter)

    def compared(self) -> dict[str, Any]:
        """The values that all processes have alike."""
        return {f"{self.mode}: {name}": value for name, value in self.spec.compared().items()}


@dataclass(frozen=True)
class OpenCompanion(Companion):
    """A model beside the trained one, with its adapter."""

    adapter: Adapter


def check_companion(companion: Companion | None, trained: ModelSpec, loss: Loss) -> None:
    """Raise UserError where a mode needs another companion for a loss, or none."""
    for mode, part in parts_of_modes("companion").items():
        part.check(None if companion is None or companion.mode != mode else companion.spec, trained, loss)
