"""Weights of `pipeline` that stay in CPU memory and visit their devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self, cast

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline.chunks import ChunkKeys
from hf_gpipe.recipe.pipeline.stages import AUTO, DEALT_STAGES, HEAD_IN_PARTS, TEACHER
from hf_gpipe.recipe.section import NotWith, OneOf, section
from hf_gpipe.schedule import DEALT, Schedule, is_table_file
from hf_gpipe.schedule.kinds import LOAD

Visitors = Literal["frozen", "all"]
"""The weights that visit their device: those that are not trained, or all but trained ones that stages may share."""


@section(kw_only=False)
class VisitKeys(ChunkKeys):
    """The weights that visit their devices."""

    offload_weights: Annotated[Visitors | Annotated[str, OneOf((AUTO,))] | None, NotWith((HEAD_IN_PARTS, TEACHER))] = (
        None
    )
    """The weights that stay in CPU memory and visit the device when their stage runs, so that a device holds at most
    two stages: for models larger than all devices together. frozen: weights that are not trained, such as those under
    LoRA adapters; all: also trained weights, whose gradients go to CPU memory, where the optimizer updates the weights.
    Give each device at least three stages, and set `recompute: stage`. In the default schedule, `breadth_first`, each
    stage visits twice in a step; `schedule: round_robin`, with all, deals the stages to the processes of a machine. On
    the CPU frozen weights stay in the checkpoint's files. auto: the planner chooses, also whether any weights visit.
    null: all weights stay on their devices."""

    def check(self) -> None:
        super().check()
        visitors = self.offload_weights
        if visitors == AUTO and is_table_file(self.schedule):
            raise UserError(
                f"offload_weights is auto and schedule is {self.schedule}, a table; give the weights that visit under "
                "it, or leave offload_weights out."
            )
        if "host" in (self.recompute or ()) and visitors not in (None, AUTO):
            raise UserError(
                f"recompute is {self.recompute if isinstance(self.recompute, str) else list(self.recompute)} and "
                f"offload_weights {visitors}: graphs on the host keep weights on the device; let recompute be stage, "
                "or leave offload_weights out."
            )
        if self.schedule in DEALT:
            self.check_dealt()

    def check_table(self, table: Schedule) -> None:
        """Raise UserError where weights visit in a table alone."""
        if LOAD in table.kinds and self.offload_weights is None:
            raise UserError(
                f"the table {table.name!r} loads and drops weights (L and D), and offload_weights is not given; set it "
                "to frozen or all, or leave L and D out of the table"
            )

    def check_dealt(self) -> None:
        """Raise UserError for keys that stages do not go with which are dealt to all processes."""
        if self.offload_weights not in ("all", AUTO):
            raise UserError(
                f"schedule is {self.schedule} and offload_weights {self.offload_weights or 'null'}: its stages are "
                "dealt to all processes, so all weights visit, adapters too; set offload_weights to all, or use "
                "another schedule."
            )
        self.check_beside(DEALT_STAGES)

    @property
    def visitors(self) -> Visitors | None:
        """The weights that visit the device of their stage; None: none does. Raises UserError where a plan is to choose
        them."""
        if self.leaves_visits_open:
            raise UserError("offload_weights is auto, which a plan chooses; give frozen or all, or leave it out.")
        return cast("Visitors | None", self.offload_weights)

    def visited_by(self, visitors: Visitors | None) -> Self:
        """A copy in which these weights visit."""
        return replace(self, offload_weights=visitors)

    @property
    def leaves_visits_open(self) -> bool:
        """Whether the planner chooses the weights that visit."""
        return self.offload_weights == AUTO
