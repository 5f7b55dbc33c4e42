"""How the executor performs an asynchronous table: with the version of the weights that each action reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hf_gpipe.modes.asynchronous.versions import Versions
from hf_gpipe.runtime.micro_batch import StepOptions
from hf_gpipe.runtime.step import ModeState, Performed, Planned, Rows, Run, Step, StepResult, Tensors
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.versions import Use, uses

NAME = "asynchronous"


class State(ModeState):
    """The versions of the weights of each stage, while a table is asynchronous."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        #: By stage; empty for a synchronous table.
        self.versions: dict[int, Versions] = {}

    def prepare(self, schedule: Schedule) -> None:
        rows = self.rows.values() if schedule.is_window else ()
        stages = {number: stage for row in rows for number, stage in row.items()}
        self.versions = {number: Versions(stage.model.parameters.values()) for number, stage in stages.items()}

    def begin(self, options: StepOptions) -> None:
        for versions in self.versions.values():
            versions.begin()

    def end(self, result: StepResult) -> None:
        for versions in self.versions.values():
            versions.end()
        result.stash_bytes = sum(versions.most_bytes for versions in self.versions.values())

    def reset(self) -> None:
        for versions in self.versions.values():
            versions.end()

    def wrap(self, schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
        """Let an action read its version of the weights, and let U update its own stage."""
        use = _uses(schedule, worker)[action] if schedule.is_window else None
        if use is None:
            return performed
        if action.kind.changes_weights:
            return Performed(_update(use), _await_gradients)
        return performed._replace(run=_read(performed.run, use)) if action.kind.reads_weights else performed


@lru_cache(maxsize=16)
def _uses(schedule: Schedule, worker: int) -> Mapping[Action, Use | None]:
    return dict(zip(schedule.actions[worker], uses(schedule, worker), strict=True))


def _versions(step: Step, planned: Planned) -> Versions:
    state: State = step.modes[NAME]
    return state.versions[planned.action.stage]


def _read(run: Run, use: Use) -> Run:
    def run_with_version(step: Step, planned: Planned, received: Tensors) -> Tensors:
        with _versions(step, planned).reading(use.version, is_last=use.is_last):
            return run(step, planned, received)

    return run_with_version


def _update(use: Use) -> Run:
    def update(step: Step, planned: Planned, received: Tensors) -> Tensors:
        assert step.update_stage is not None, "an asynchronous table needs update_stage"
        with _versions(step, planned).updating(keeps=not use.is_last):
            step.update_stage(planned.action.stage, planned.action.step)
        return {}

    return update


def _await_gradients(step: Step, planned: Planned) -> None:
    if step.replicas is not None:
        step.replicas.finish(planned.action.stage)
