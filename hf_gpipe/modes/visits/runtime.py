"""How the executor performs L, D, H and A, and actions whose stage has its weights for a visit."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.late_updates import LATE_UPDATE
from hf_gpipe.modes.visits.shared_memory import SharedMemory
from hf_gpipe.modes.visits.visit import DROP, LOAD, visit_of
from hf_gpipe.modes.visits.weights import VisitingWeights
from hf_gpipe.runtime.channel import Channel
from hf_gpipe.runtime.late_updates import LateUpdates
from hf_gpipe.runtime.micro_batch import StepOptions
from hf_gpipe.runtime.performing import perform, update
from hf_gpipe.runtime.step import Message, ModeState, Performed, Planned, Rows, Run, Step, Tensors
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import REDUCE, Resource
from hf_gpipe.schedule.table import Schedule

NAME = "visits"


class State(ModeState):
    """The visits of the weights of this process's stages.

    Args:
        visits: by worker; none where no weights visit.
        relays: the channels of `relays.connect_relays`, where stages are shared.
        memory: where the weights and gradients of shared stages are in CPU memory. None: stages are not dealt.
        owners: the worker of each stage that this process owns.
        late: the updates that wait for this step. None: none ever waits.
    """

    def __init__(
        self,
        rows: Rows,
        visits: Mapping[int, VisitingWeights] | None = None,
        relays: Mapping[tuple[int, int, int], Channel] | None = None,
        memory: SharedMemory | None = None,
        owners: Mapping[int, int] | None = None,
        late: LateUpdates | None = None,
    ) -> None:
        super().__init__(rows)
        self.visits, self._relays, self.memory, self._owners = visits or {}, relays or {}, memory, owners or {}
        self.channels = [*self._relays.values()]
        self.late = LateUpdates() if late is None else late
        #: The stages that a thread is to update, and those of them that it is then to load.
        self._updating: set[int] = set()
        self._awaited: set[int] = set()
        #: Guards these two, and the visits, which the thread begins too.
        self._lock = threading.Lock()

    def message(self, source: Action, consumer: Action, sender: int, receiver: int) -> Message | None:
        if not source.kind.is_signal:
            return None
        number = -1 if consumer.micro_batch is None else consumer.micro_batch
        return Message(self._relays[source.stage, sender, receiver], (number, 0), lambda _: {"done": (1,)})

    def begin(self, options: StepOptions) -> None:
        # A step that has failed may have left some.
        self._updating.clear()

    def update_late(self, step: Step, planned: Planned) -> None:
        """Make the update of a stage that waits, in a thread, and load the stage if the loop has come to its L."""
        stage = planned.action.stage

        def update() -> None:
            come = time.perf_counter()
            self.late.make([stage])
            if step.timer is not None:
                step.result.times.append(ActionTime(planned.action, come, time.perf_counter()))
            with self._lock:
                if stage in self._awaited:
                    self._awaited.remove(stage)
                    self.visits[planned.worker].load(stage)
                self._updating.discard(stage)

        if stage in self.late:
            self._updating.add(stage)
            step.threads.begin(Resource.HOST, planned.action, update)

    def load(self, worker: int, stage: int) -> None:
        """Load a stage, or let the thread that updates it do so: the loop goes on with the stage before."""
        with self._lock:
            if stage in self._updating:
                self._awaited.add(stage)
                return
            self.late.make([stage])
            self.visits[worker].load(stage)

    def drop(self, worker: int, stage: int) -> None:
        with self._lock:
            self.visits[worker].drop(stage)

    def await_late_update(self, step: Step, planned: Planned) -> None:
        step.threads.wait_until(lambda: planned.action.stage not in self._updating)

    def collect(self) -> None:
        """Wait until all gradients of visiting weights are in CPU memory, for shared stages those of all workers."""
        for visits in self.visits.values():
            visits.finish()
        if self.memory is not None:
            self.memory.collect()

    def reset(self) -> None:
        with self._lock:
            self._awaited.clear()
            for visits in self.visits.values():
                visits.reset()

    def using(self, stage: int) -> AbstractContextManager[object]:
        visits = self.visits.get(self._owners.get(stage, -1))
        self.late.make([stage])
        return nullcontext() if visits is None else visits.visit(stage)

    def wrap(self, schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
        """Let an action run in a visit of its stage's weights; G of a shared stage waits for the gradients."""
        if action.kind == REDUCE and schedule.placement.is_shared:
            return performed._replace(wait=_await_gradients)
        if action.micro_batch is None or visit_of(schedule, worker, action) is None:
            return performed
        wait = self.await_late_update if LATE_UPDATE in schedule.kinds else performed.wait
        return Performed(_in_visit(performed.run), wait)


def _state(step: Step) -> State:
    state: State = step.modes[NAME]
    return state


def _visits(step: Step, planned: Planned) -> VisitingWeights:
    return _state(step).visits[planned.worker]


def _load(step: Step, planned: Planned, received: Tensors) -> Tensors:
    _state(step).load(planned.worker, planned.action.stage)
    return {}


def _drop(step: Step, planned: Planned, received: Tensors) -> Tensors:
    _state(step).drop(planned.worker, planned.action.stage)
    if not planned.sent:
        return {}
    done = {"done": torch.ones(1, dtype=torch.uint8)}
    if (wait := _visits(step, planned).wait_for_host()) is None:
        return done
    step.send_after(wait, planned, done)
    return {}


def _update_late(step: Step, planned: Planned, received: Tensors) -> Tensors:
    _state(step).update_late(step, planned)
    return {}


def _await_host_updates(step: Step, planned: Planned) -> None:
    _update_in_background(step, planned)
    if planned.is_last:
        step.complete()


def _update_in_background(step: Step, planned: Planned) -> None:
    """Update a shared stage in a background thread, once its gradients are in CPU memory, while the loop goes on."""
    state = _state(step)
    ways = [wait for visits in state.visits.values() if (wait := visits.wait_for_host()) is not None]

    def update_stage() -> None:
        assert step.update_stage is not None, "a table with H needs update_stage"
        come = time.perf_counter()
        for wait in ways:
            wait()
        for incoming in planned.received_in_background:
            incoming.channel.receive(incoming.key)
        if state.memory is not None:
            state.memory.collect_stage(planned.action.stage)
        begun = time.perf_counter()
        step.update_stage(planned.action.stage, planned.action.step)
        if step.timer is not None:
            step.result.times.append(ActionTime(planned.action, come, time.perf_counter(), begun - come))

    step.threads.begin(Resource.HOST, planned.action, update_stage)


perform(LOAD, _load)
perform(DROP, _drop)
perform(LATE_UPDATE, _update_late)
perform(HOST_UPDATE, update, _await_host_updates)


def _await_gradients(step: Step, planned: Planned) -> None:
    step.collect()


def _in_visit(run: Run) -> Run:
    def run_in_visit(step: Step, planned: Planned, received: Tensors) -> Tensors:
        adds_gradients = planned.action.kind.completes_micro_batch
        _visits(step, planned).enter(planned.action.stage, adds_gradients=adds_gradients)
        return run(step, planned, received)

    return run_in_visit
