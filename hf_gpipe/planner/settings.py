"""What a run leaves to the planner, and what the planner makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.recipe import Recipe
from hf_gpipe.recipe.sizes import read_bytes

AUTO = "auto"

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""What `Pipeline` takes: "none", "block" or "stage", or for each stage one of these or its most live graphs."""

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
class Settings:
    """How a model is run as a pipeline, everything decided.

    Attributes:
        num_stages: K.
        num_micro_batches: M.
        schedule: name of a training table.
        recompute: what each stage recomputes, as `Pipeline` takes it.
        partition: the number of layers of each stage.
        num_processes: processes that share the stages, P, at most K.
        optimizer: one of `OPTIMIZER_SLOTS`.
        fp32_master_weights: whether the optimizer updates float32 copies of the weights.
    """

    num_stages: int
    num_micro_batches: int
    schedule: str
    recompute: RecomputeChoice
    partition: tuple[int, ...]
    num_processes: int
    optimizer: str = "adamw_torch_fused"
    fp32_master_weights: bool = False

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    def state_share(self, dtype: str) -> float:
        """Bytes of the optimizer's state a byte of trainable weights of this type."""
        slots = OPTIMIZER_SLOTS[self.optimizer]
        # A master copy and its gradient in float32, and the state with them.
        return (slots + 2) * 4 / ITEM_BYTES[dtype] if self.fp32_master_weights else slots


@dataclass(frozen=True)
class Request:
    """How a model shall be run as a pipeline, with "auto" where the planner decides.

    Attributes:
        num_stages: K.
        num_micro_batches: M, or "auto".
        schedule: name of a training table, or "auto".
        recompute: "none", "block", "stage", an entry for each stage, or "auto".
        partition: "count", "parameters", "flops", "profile", "auto", or the number of layers of each stage.
        num_processes: processes that share the stages; None: one a stage.
        optimizer: one of `OPTIMIZER_SLOTS`.
        fp32_master_weights: whether the optimizer updates float32 copies of the weights.
        memory_bytes: the most that a process may use; None: nothing is known, so nothing is saved for.

    Raises:
        UserError: a number of processes that no placement has, or an optimizer whose state is not known.
    """

    num_stages: int
    num_micro_batches: int | str = 1
    schedule: str = "gpipe"
    recompute: str | Sequence[str | int] = "stage"
    partition: str | Sequence[int] = "count"
    num_processes: int | None = None
    optimizer: str = "adamw_torch_fused"
    fp32_master_weights: bool = False
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        if not 1 <= self.processes <= self.num_stages:
            raise UserError(
                f"{self.processes} devices for num_stages={self.num_stages}: use between 1 and num_stages, for each "
                "device holds a stage or more."
            )

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return self.num_stages if self.num_processes is None else self.num_processes

    @property
    def given_micro_batches(self) -> int:
        """M where it is not "auto"."""
        assert isinstance(self.num_micro_batches, int), "M is decided before it is used"
        return self.num_micro_batches

    @property
    def recompute_choice(self) -> RecomputeChoice:
        """`recompute` as `Pipeline` takes it."""
        return self.recompute if isinstance(self.recompute, str) else tuple(self.recompute)

    @property
    def is_settled(self) -> bool:
        """Whether the planner has nothing to decide."""
        by_cost = isinstance(self.partition, str) and self.partition != "count"
        return not by_cost and AUTO not in (self.num_micro_batches, self.schedule, self.recompute)

    @classmethod
    def of_recipe(cls, recipe: Recipe, num_processes: int | None = None, memory_bytes: int | None = None) -> Request:
        """A recipe's own; `num_processes` and `memory_bytes` replace what it says, where given."""
        pipeline = recipe.pipeline
        if memory_bytes is None and pipeline.memory is not None:
            memory_bytes = read_bytes(pipeline.memory, "pipeline.memory")
        return cls(
            num_stages=pipeline.num_stages,
            num_micro_batches=pipeline.num_micro_batches,
            schedule=pipeline.schedule,
            recompute=pipeline.recompute,
            partition=pipeline.partition,
            num_processes=num_processes or pipeline.num_processes,
            optimizer=recipe.training.optim,
            fp32_master_weights=recipe.training.fp32_master_weights,
            memory_bytes=memory_bytes,
        )


@dataclass(frozen=True)
class Settled:
    """What `resolve` decided; each of the first four is an argument of `Pipeline`.

    Attributes:
        partition: the number of layers of each stage.
        why: one line for the log: what was chosen, and why.
    """

    partition: list[int]
    schedule: str
    num_micro_batches: int
    recompute: RecomputeChoice
    why: str


def check_optimizer(name: str) -> None:
    """Raises UserError where the state of an optimizer is not known."""
    if name not in OPTIMIZER_SLOTS:
        raise UserError(
            f"the optimizer {name!r} has no known size of state; use one of {', '.join(OPTIMIZER_SLOTS)}"
            f"{nearest(name, OPTIMIZER_SLOTS)}"
        )
