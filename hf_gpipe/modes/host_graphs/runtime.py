"""How the executor performs O and P, and what F and the backward of a graph on the host do beside."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_gpipe.modes.host_graphs.copies import HostCopies, SavedTensors
from hf_gpipe.modes.host_graphs.table import OFFLOAD, PREFETCH, is_away
from hf_gpipe.runtime.performing import perform
from hf_gpipe.runtime.step import ModeState, Performed, Planned, Rows, Run, Step, Tensors
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, Held
from hf_gpipe.schedule.table import Schedule

NAME = "host_graphs"


class State(ModeState):
    """The saved tensors of each graph that is, or will be, on the host, and the copies of each device."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        devices = {stage.device for row in rows.values() for stage in row.values()}
        self.copies = {device: HostCopies(device) for device in devices}
        self.saved: dict[tuple[int, int], SavedTensors] = {}

    def reset(self) -> None:
        self.saved.clear()
        for copies in self.copies.values():
            copies.reset()

    def wrap(self, schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
        """Let F of a graph that goes to the host keep what it saves, and let its backward wait until that is back."""
        if action.micro_batch is None or action.kind in (OFFLOAD, PREFETCH) or not is_away(schedule, action):
            return performed
        if action.kind == FORWARD:
            return performed._replace(run=_saving(performed.run))
        return performed._replace(run=_arriving(performed.run)) if Held.GRAPH in action.kind.frees else performed


def _state(step: Step) -> State:
    state: State = step.modes[NAME]
    return state


def _offload(step: Step, planned: Planned, received: Tensors) -> Tensors:
    state = _state(step)
    state.copies[planned.device].leave(state.saved[planned.action.stage, planned.index])
    return {}


def _prefetch(step: Step, planned: Planned, received: Tensors) -> Tensors:
    state = _state(step)
    state.copies[planned.device].come(state.saved[planned.action.stage, planned.index])
    return {}


perform(OFFLOAD, _offload)
perform(PREFETCH, _prefetch)


def _saving(run: Run) -> Run:
    def run_and_save(step: Step, planned: Planned, received: Tensors) -> Tensors:
        saved = SavedTensors(planned.device)
        with saved.hooks():
            message = run(step, planned, received)
        saved.keep(_held(step, planned, received))
        _state(step).saved[planned.action.stage, planned.index] = saved
        return message

    return run_and_save


def _arriving(run: Run) -> Run:
    def arrive_and_run(step: Step, planned: Planned, received: Tensors) -> Tensors:
        _state(step).saved.pop((planned.action.stage, planned.index)).arrive()
        return run(step, planned, received)

    return arrive_and_run


def _held(step: Step, planned: Planned, received: Tensors) -> Iterator[torch.Tensor]:
    """The tensors that are on the device anyway while a graph is away."""
    yield from planned.stage.tensors_between_actions()
    yield from received.values()
    inputs = step.context(planned, received).micro_batch.inputs
    yield from (tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor))
