"""What a pipeline is asked to be: the same in all processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.planner.workload import OF_THE_READER, PlanInputs
from hf_gpipe.recipe import PipelineConfig
from hf_gpipe.recipe.pipeline import OF_EACH_PROCESS
from hf_gpipe.runtime.agreement import compare
from hf_gpipe.runtime.loss import PLAIN, Loss
from hf_gpipe.schedule.file import TABLE_SUFFIX, is_table_file


@dataclass(frozen=True)
class PipelineRequest:
    """A pipeline as it is asked for. `Pipeline` says what its arguments mean.

    Attributes:
        model: the model.
        config: how it is cut and run.
        inputs: of the planner; its `packing` says whether training packs rows.
        seed: None: the default of recipes.
        loss: of training; of a model that classifies rows in another way, the plain one is replaced.
        length_bucketing: whether training sorts rows by length.
    """

    model: ModelSpec
    config: PipelineConfig
    inputs: PlanInputs = field(default_factory=PlanInputs)
    seed: int | None = None
    loss: Loss = PLAIN
    length_bucketing: bool = False

    def compare(self) -> None:
        """Compare it with that of the other processes. Every process calls it. Raises DisagreementError."""
        compare(self._compared, "arguments of the Pipeline")

    def _compared(self) -> dict[str, Any]:
        same = {name: value for name, value in vars(self.config).items() if name not in OF_EACH_PROCESS}
        if is_table_file(self.config.schedule):
            same["schedule"] = TABLE_SUFFIX  # the main process reads it, and the others may know another path
        same |= {name: value for name, value in vars(self.inputs).items() if name not in OF_THE_READER}
        of_tokens = self.loss.of_tokens
        same |= {"label_smoothing": of_tokens.label_smoothing, "logit_clipping": of_tokens.logit_clipping}
        same |= {"seed": self.seed, "loss": self.loss, "length_bucketing": self.length_bucketing}
        return same | self.model.compared()

    def compare_commit(self, adapter: Adapter) -> None:
        """Compare the version of a model of the Hub: each machine has it in a cache of its own."""
        model = self.model.model
        if isinstance(model, str) and not os.path.isdir(model):
            commit = getattr(adapter.given_config, "_commit_hash", None)
            compare(lambda: {"the model's commit": commit}, model)
