"""Checks of stages that update by themselves."""

from __future__ import annotations

from hf_gpipe.errors import UserError
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.pipeline.mode_builder import ModeBuilder, check_no_batch_norm


class Builder(ModeBuilder):
    """Checks that no parameter is trained by two stages, and that no layer needs a whole mini-batch."""

    def check(self) -> None:
        building = self.building
        if building.decision.runs_windows:
            check_no_batch_norm(building.decision)
            _check_no_tie(building.decision, building.parameters)


def _check_no_tie(decision: Decision, parameters: StageParameters) -> None:
    """Raise UserError, on every process, where stages that update by themselves would train one parameter."""
    for name, stages in sorted(parameters.ties.stages_of.items()):
        if len(stages) > 1 and parameters.trainable.parameters[name]:
            raise UserError(
                f"schedule {decision.config.schedule!r}: {name} is tied, stages {stages} train it, and each of them "
                "would update it at another time; use a model whose weights are not tied (tie_word_embeddings: "
                "false), a partition that puts its layers into one stage, or a synchronous schedule, such as 1f1b"
            )
