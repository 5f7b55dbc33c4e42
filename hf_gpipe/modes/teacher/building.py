"""Building stages that have the stage of a teacher beside their own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.modes.teacher.stage import PREFIX, StageWithTeacher
from hf_gpipe.pipeline.mode_builder import ModeBuilder
from hf_gpipe.runtime.stage import Stage


class Builder(ModeBuilder):
    """Makes the teacher's stages, where there is a teacher."""

    @cached_property
    def _models(self) -> Mapping[int, StageModel]:
        teacher, building = self.building.decision.teacher, self.building
        return {} if teacher is None else teacher.stages(building.decision.world.stage_devices, building.ranks)

    def stage_type(self, number: int) -> Callable[..., Stage] | None:
        return partial(StageWithTeacher, teacher=self._models[number]) if number in self._models else None

    def dtype_of(self, stage: int, name: str) -> torch.dtype | None:
        teacher = self.building.decision.teacher
        if teacher is None or not name.startswith(PREFIX):
            return None
        return teacher.carry_dtype(stage, name.removeprefix(PREFIX))
