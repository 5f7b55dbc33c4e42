"""Weights that stay in CPU memory and visit their devices, and stages that are all processes share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.modes.visits.round_robin import ROUND_ROBIN
from hf_gpipe.modes.visits.visit import LOAD
from hf_gpipe.schedule import Schedule, is_table_file
from hf_gpipe.settings.mode import AUTO, COMPARED_ROWS, RUN, Auto, Keys, Mode, Visitors
from hf_gpipe.settings.section import refuse_given


class Visits(Mode):
    """The weights that visit their devices."""

    excludes: ClassVar[dict[str, str]] = {
        "host_graphs": "recompute is {recompute} and offload_weights {offload_weights}: graphs on the host keep "
        "weights on the device; let recompute be stage, or leave offload_weights out."
    }

    offload_weights: Visitors | Auto | None = None
    """The weights that stay in CPU memory and visit the device when their stage runs, so that a device holds at most
    two stages: for models larger than all devices together. frozen: weights that are not trained, such as those under
    LoRA adapters; experts: of these the experts of a mixture alone; all: also trained weights, whose gradients go to
    CPU memory, where the optimizer updates the weights. Give each device at least three stages, and set `recompute:
    stage`. In the default schedule, `breadth_first`, each stage visits twice in a step; `schedule: round_robin`, with
    all, deals the stages to the processes of a machine. On the CPU frozen weights stay in the checkpoint's files. auto:
    the planner chooses, also whether any weights visit. null: all weights stay on their devices."""

    resident_stages: Annotated[int, Field(ge=0)] | Auto = 0
    """The number of stages of each device whose weights stay on it while those of the others visit; at least three
    stages of a device visit. Each stage that stays saves the copies of its weights in every step, and with them also
    weights stay that several stages share. auto: as many as fit, if that makes steps shorter; with `offload_weights:
    auto` the planner chooses too."""

    offload_pinned: Annotated[bool, RUN] = True
    """Whether the CPU memory of weights that visit a GPU is pinned. false: it is pageable, for machines that forbid or
    limit pinned memory, and frozen weights stay in the checkpoint's files, which may be larger than the CPU memory;
    copies are then slower, and the process waits for them."""

    def check(self, keys: Keys) -> None:
        if self.offload_weights is None:
            names = "resident_stages", "offload_pinned"
            refuse_given(self, names, "offload_weights is null; say which weights visit")
        for name, what in (
            ("offload_weights", "weights that visit"),
            ("resident_stages", "number of stages that stay"),
        ):
            if keys[name] == AUTO and is_table_file(keys["schedule"]):
                raise UserError(
                    f"{name} is auto and schedule is {keys['schedule']}, a table; give the {what} under it, or leave "
                    f"{name} out."
                )

    def plain(self, keys: Keys) -> dict[str, Any]:
        # The planner chooses nothing beside weights that visit, unless it chooses them too.
        return {} if self.offload_weights in (None, AUTO) else {"schedule": "breadth_first"}

    def check_table(self, table: Schedule) -> None:
        if LOAD in table.kinds and self.offload_weights is None:
            raise UserError(
                f"the table {table.name!r} loads and drops weights (L and D), and offload_weights is not given; set it "
                "to frozen or all, or leave L and D out of the table"
            )


class DecidedVisits(Visits):
    """Weights that visit, and are known."""

    offload_weights: Visitors | None = None
    resident_stages: Annotated[int, Field(ge=0)] = 0


class SharedStages(Mode):
    """Stages that are dealt to all processes."""

    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("division", "chunks"), ""),
        COMPARED_ROWS: "schedule {schedule!r} and a {loss}, which compares rows: the last stage must be in one place; "
        "use breadth_first",
    }

    schedules = (ROUND_ROBIN,)

    def check(self, keys: Keys) -> None:
        if self.is_on(keys):
            self.check_visits(keys)
            if keys["resident_stages"] not in (0, AUTO):
                raise UserError(
                    f"schedule is {keys['schedule']} and resident_stages is {keys['resident_stages']}: no stage has a "
                    "device of its own; leave resident_stages out, or use breadth_first."
                )

    @staticmethod
    def check_visits(keys: Keys) -> None:
        """Raise UserError unless all weights visit."""
        if (given := keys["offload_weights"]) not in ("all", AUTO):
            raise UserError(
                f"schedule is {keys['schedule']} and offload_weights {given or 'null'}: its stages are "
                "dealt to all processes, so all weights visit, adapters too; set offload_weights to all, or use "
                "another schedule."
            )


FIELDS = {"visits": (Visits, DecidedVisits), "shared_stages": (SharedStages, SharedStages)}
