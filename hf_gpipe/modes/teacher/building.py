"""Building stages that have the stage of a teacher beside their own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.model.assembly import assemble
from hf_gpipe.modes.teacher.stage import PREFIX, StageWithTeacher
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline.mode_builder import Building, ModeBuilder
from hf_gpipe.runtime.stage import Stage


class Builder(ModeBuilder):
    """Makes the teacher's stages, where there is a teacher."""

    def __init__(self, building: Building) -> None:
        super().__init__(building)
        self._teacher, decision = building.decision.companion, building.decision
        #: The layers of each stage, about as many in each.
        self._layers: Sequence[range] = ()
        if self._teacher is not None and self._teacher.mode == "teacher":
            self._layers = cut(len(self._teacher.adapter.layers), decision.config.num_stages, "count")

    @cached_property
    def _models(self) -> Mapping[int, StageModel]:
        stages, ranks = dict[int, StageModel](), self.building.ranks
        for number, device in self.building.decision.world.stage_devices.items() if self._layers else ():
            assert self._teacher is not None
            weights: Any = self._teacher.spec.model  # no configuration: it is opened
            stages[number] = assemble(self._teacher.adapter, self._layers[number], weights, device, ranks=ranks)
            stages[number].model.eval()
        return stages

    def stage_type(self, number: int) -> Callable[..., Stage] | None:
        return partial(StageWithTeacher, teacher=self._models[number]) if number in self._models else None

    def dtype_of(self, stage: int, name: str) -> torch.dtype | None:
        if self._teacher is None or not name.startswith(PREFIX):
            return None
        return self._teacher.adapter.carry_dtype(self._layers[stage][0], name.removeprefix(PREFIX))
