"""The planner's inputs beside the model and its `PipelineConfig`: the mini-batch and the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe, TrainingSection
from hf_gpipe.schedule import Schedule

#: For each optimizer of a recipe the tensors of state that it keeps, as a multiple of the trainable weights. Adafactor
#: keeps a row and a column of each matrix, under a hundredth of it from 200 by 200 on.
OPTIMIZER_SLOTS: dict[str, float] = {
    "adamw_torch_fused": 2,
    "adamw_torch": 2,
    "adafactor": 0.01,
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
}

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight."""


@dataclass(frozen=True)
class PlanInputs:
    """The planner's inputs beside the model and its `PipelineConfig`.

    Attributes:
        example: a mini-batch as long as the longest to come, or its shape; read in the main process. None: nothing is
            known, so nothing can be planned.
        optim: the optimizer, by transformers' name.
        fp32_master_weights: whether it updates float32 copies of the weights.
        accumulation: mini-batches in a step.
        tables: by the path that names them as a schedule, the tables that were read from files.
    """

    example: Mapping[str, torch.Tensor] | Workload | None = None
    optim: str = TrainingSection.optim
    fp32_master_weights: bool = TrainingSection.fp32_master_weights
    accumulation: int = TrainingSection.gradient_accumulation_steps
    tables: Mapping[str, Schedule] = field(default_factory=dict)

    @classmethod
    def of_recipe(cls, recipe: Recipe, *, is_encoder_decoder: bool) -> PlanInputs:
        """A recipe's own; `is_encoder_decoder` is of the model's configuration."""
        training = recipe.training
        return cls(
            Workload.of_recipe(recipe, num_micro_batches=1, is_encoder_decoder=is_encoder_decoder),
            training.optim,
            training.fp32_master_weights,
            training.gradient_accumulation_steps,
        )

    def mini_batch(self) -> Workload:
        """The shape of `example`. Raises UserError where there is none."""
        if self.example is None:
            raise UserError(
                "the planner needs the shape of a mini-batch to choose auto values or to cut the model by cost: give "
                "example=, a mini-batch as long as the longest to come"
            )
        return self.example if isinstance(self.example, Workload) else Workload.of_batch(self.example)

    def check(self) -> None:
        """Raise UserError where the optimizer's state has no known size."""
        if self.optim not in OPTIMIZER_SLOTS:
            raise UserError(
                f"the optimizer {self.optim!r} has no known size of state; use one of {', '.join(OPTIMIZER_SLOTS)}"
                f"{nearest(self.optim, OPTIMIZER_SLOTS)}"
            )

    def state_share(self, dtype: str) -> float:
        """Bytes of the optimizer's state per byte of trainable weights of this type."""
        slots = OPTIMIZER_SLOTS[self.optim]
        # A master copy and its gradient in float32, and the state with them.
        return (slots + 2) * 4 / ITEM_BYTES[dtype] if self.fp32_master_weights else slots
