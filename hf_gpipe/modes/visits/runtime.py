"""How the executor performs L and D, and actions whose stage has its weights for a visit."""

from __future__ import annotations

import torch

from hf_gpipe.runtime.performing import Performed
from hf_gpipe.runtime.step import ModeState, Planned, Run, Step, Tensors
from hf_gpipe.runtime.visits import VisitingWeights
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import DROP, LOAD
from hf_gpipe.schedule.table import Schedule


class State(ModeState):
    """The visits of each worker's stages, which its row has."""

    def reset(self) -> None:
        for row in self.rows.values():
            row.visits.reset()


def _visits(step: Step, planned: Planned) -> VisitingWeights:
    return step.rows[planned.worker].visits


def _load(step: Step, planned: Planned, received: Tensors) -> Tensors:
    _visits(step, planned).load(planned.action.stage)
    return {}


def _drop(step: Step, planned: Planned, received: Tensors) -> Tensors:
    visits = _visits(step, planned)
    visits.drop(planned.action.stage)
    if not planned.sent:
        return {}
    done = {"done": torch.ones(1, dtype=torch.uint8)}
    if (wait := visits.way_home()) is None:
        return done
    step.send_after(wait, planned, done)
    return {}


PERFORMED = {LOAD: Performed(_load), DROP: Performed(_drop)}


def wrap(schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
    """Let an action run in a visit of its stage's weights."""
    is_visited = LOAD in schedule.kinds and action.micro_batch is not None
    return performed._replace(run=_in_visit(performed.run)) if is_visited else performed


def _in_visit(run: Run) -> Run:
    def run_in_visit(step: Step, planned: Planned, received: Tensors) -> Tensors:
        adds_gradients = planned.action.kind.completes_micro_batch
        _visits(step, planned).enter(planned.action.stage, adds_gradients=adds_gradients)
        return run(step, planned, received)

    return run_in_visit
