"""Building stages that have the stage of a teacher beside their own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from transformers import PreTrainedConfig

from hf_gpipe.adapters import StageModel
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.companion import OpenCompanion
from hf_gpipe.modes.teacher.key import MODE
from hf_gpipe.modes.teacher.stage import PREFIX, StageWithTeacher
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline.mode_builder import ModeBuilder
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.settings.division import Division


class Builder(ModeBuilder):
    """Makes the teacher's stages, where there is a teacher."""

    @cached_property
    def _teacher(self) -> OpenCompanion | None:
        companion = self.building.decision.companion
        return None if companion is None or companion.mode != MODE else companion

    def _layers(self, teacher: OpenCompanion) -> Sequence[range]:
        """The layers of each stage, about as many in each."""
        return cut(len(teacher.adapter.layers), self.building.decision.config.num_stages, "count")

    @cached_property
    def _models(self) -> Mapping[int, StageModel]:
        teacher, ranks = self._teacher, self.building.ranks
        if teacher is None:
            return {}
        # The layers of the student may be divided among them.
        ranks = ranks and replace(ranks, division=Division(ranks.division.num_ranks))
        stages, layers = {}, self._layers(teacher)
        for number, device in self.building.decision.world.stage_devices.items():
            assert not isinstance(teacher.spec.model, PreTrainedConfig)
            stages[number] = assemble(teacher.adapter, layers[number], teacher.spec.model, device, ranks=ranks)
            stages[number].model.eval()
        return stages

    def stage_type(self, number: int) -> Callable[..., Stage] | None:
        return partial(StageWithTeacher, teacher=self._models[number]) if number in self._models else None

    def dtype_of(self, stage: int, name: str) -> torch.dtype | None:
        teacher = self._teacher
        if teacher is None or not name.startswith(PREFIX):
            return None
        return teacher.adapter.carry_dtype(self._layers(teacher)[stage][0], name.removeprefix(PREFIX))
