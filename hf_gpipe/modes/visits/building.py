"""Building stages whose weights visit: they are left in CPU memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hf_gpipe.adapters import StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.modes.visits.key import SharedStages
from hf_gpipe.modes.visits.relays import connect_relays
from hf_gpipe.modes.visits.runtime import State
from hf_gpipe.modes.visits.shared_memory import SharedMemory
from hf_gpipe.modes.visits.table import check_visits, visiting_stages
from hf_gpipe.modes.visits.weights import VisitingWeights, keep, leave_on_host
from hf_gpipe.pipeline.decision import Decision, check_draws_alike
from hf_gpipe.pipeline.mode_builder import Building, ModeBuilder, check_no_batch_norm
from hf_gpipe.runtime.step import Rows
from hf_gpipe.settings.mode import COMPARED_ROWS


class Builder(ModeBuilder):
    """Leaves weights in CPU memory, and makes their visits."""

    def __init__(self, building: Building) -> None:
        super().__init__(building)
        decision = building.decision
        _check_shared_stages(decision)
        self._memory = (
            SharedMemory(decision.world, is_pinned=decision.config.visits.offload_pinned)
            if decision.world.placement.is_shared
            else None
        )
        building.shared = self._memory
        self._visiting = visiting_stages(decision.full_table)
        if visitors := decision.config.visits.offload_weights:
            self.maps_files = True
            check_visits(decision.full_table, are_trained=visitors == "all")

    def assembled(self, number: int, models: Mapping[int, StageModel]) -> None:
        """One stage after another, for together they may not fit."""
        visits, files = self.building.decision.config.visits, self.building.weights
        for model in models.values() if visits.offload_weights else ():
            if number in self._visiting:
                leave_on_host(
                    model,
                    visits.offload_weights,
                    is_shared=self._memory is not None,
                    keeps_shared=visits.resident_stages > 0,
                    is_pinned=visits.offload_pinned,
                    files=files if isinstance(files, str | os.PathLike) else None,
                )
            else:
                keep(model)
        if self._memory is not None:
            self._memory.add(number, models)

    def check(self) -> None:
        if self._memory is not None:
            check_no_batch_norm(self.building.decision)

    def state(self, rows: Rows) -> State | None:
        """Raises UserError, on every process, where no weight could visit."""
        building, world = self.building, self.building.decision.world
        visitors = building.decision.config.visits.offload_weights
        if not visitors:
            return None
        config = building.decision.config.visits
        how = {"keeps_shared": config.resident_stages > 0, "is_pinned": config.offload_pinned}
        visits = {
            worker: VisitingWeights(models, visitors, self._memory, self._visiting, **how)
            for worker, models in building.run_by.items()
        }
        if not any(world.gather_objects(sum(sum(visit.hosted_bytes.values()) for visit in visits.values()))):
            none = "no expert is frozen" if visitors == "experts" else "every weight is trained"
            raise UserError(
                f"offload_weights is {visitors}, and {none}; use all, train adapters on the model (peft_config, or "
                "lora.r), freeze a part of it, or leave offload_weights out"
            )
        frozen = {p for own in visits.values() for p in own.parameters if not p.requires_grad}
        building.parameters.ties.leave_out(frozen)
        late = building.parameters.late
        if visitors == "all" and self._memory is None:
            late.parameters = {
                stage: [parameter for parameter in own if parameter.requires_grad]
                for of_worker in visits.values()
                for stage, own in of_worker.visiting.items()
            }
        return State(rows, visits, connect_relays(world), self._memory, world.own_workers, late)


def _check_shared_stages(decision: Decision) -> None:
    """Raise UserError where stages are shared and something needs them in one place."""
    config, loss = decision.config, decision.loss
    if not decision.world.placement.is_shared:
        return
    # Of a table, whose name does not tell.
    SharedStages.check_visits(config.values())
    config.check_beside("shared_stages")
    if loss.compares_units:
        config.check_beside(COMPARED_ROWS, ["shared_stages"], loss=type(loss).__name__)
    for what, value in decision.adapter.dropout.items():
        check_draws_alike(decision.world, f"{what}={value}")
