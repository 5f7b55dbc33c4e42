"""The executor: interprets the table of any schedule for the stages of this process.

It works the same for every schedule. For each action it receives the message that the action needs, calls the stage,
and sends the result. Receives are started ahead, at the points that `hf_gpipe.schedule.messages` derives from the
table, so messages arrive while the process computes. Sends are waited for only at the end of the table.

In an asynchronous table the weights of a stage change between its actions: each reads the version that the table says
(`hf_gpipe.runtime.versions`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hf_gpipe.errors import StageError
from hf_gpipe.runtime.beside import Beside
from hf_gpipe.runtime.channel import Channel
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.homes import Homes
from hf_gpipe.runtime.micro_batch import PLAIN_STEP, MicroBatch, StepOptions, on_devices
from hf_gpipe.runtime.offload import HostCopies
from hf_gpipe.runtime.performing import (
    Message,
    Planned,
    Sent,
    Step,
    StepResult,
    Tensors,
    UpdateStage,
    performed,
    reading,
    visiting,
)
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime, NamedRanges, Timer, is_profiled
from hf_gpipe.runtime.versions import Versions
from hf_gpipe.runtime.visits import VisitingWeights
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import LOAD, Resource
from hf_gpipe.schedule.messages import in_rows, messages
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.versions import Use, uses

__all__ = ["Executor", "Row", "StepResult", "UpdateStage"]


@dataclass(frozen=True)
class Row:
    """The stages that run the row of a worker, and the visits of their weights.

    Attributes:
        stages: those whose actions may stand in the row, by number.
        visits: of their weights, for tables with L and D.
    """

    stages: Mapping[int, Stage]
    visits: VisitingWeights = field(default_factory=lambda: VisitingWeights({}))


class Executor:
    """Runs tables on the stages of this process.

    Args:
        rows: of this process's workers, by their numbers: one, or where stages are dealt one for each of its devices.
        edges: the edges at the ends of these stages, by stage, its worker and that of the next stage.
        replicas: those that these stages have in other processes, if any.
        head_edges: between these stages and the last one, by stage, its worker and that of the last stage, where the
            head is divided.
        relays: of `edges.connect_relays`, where stages are dealt.
        homes: of the weights and gradients of dealt stages.
    """

    def __init__(
        self,
        rows: Mapping[int, Row],
        edges: Edges,
        replicas: Replicas | None = None,
        head_edges: Edges | None = None,
        relays: Mapping[tuple[int, int, int], Channel] | None = None,
        homes: Homes | None = None,
    ) -> None:
        self._rows, self._workers = rows, {*rows}
        self._edges, self._head_edges, self._relays = edges, head_edges or {}, relays or {}
        self._every_edge = (*edges.values(), *self._head_edges.values())
        self._channels = (*(way for edge in self._every_edge for way in (edge.down, edge.up)), *self._relays.values())
        self._replicas, self._homes = replicas, homes
        self._every_stage = [stage for row in rows.values() for stage in row.stages.values()]
        self._devices = {stage.device for stage in self._every_stage}
        self._copies = {device: HostCopies(device) for device in self._devices}
        self._table: Schedule | None = None
        self._planned: list[Planned] = []
        #: Of each stage, while the table is asynchronous.
        self._versions: dict[int, Versions] = {}
        self._beside = Beside(min(rows))

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        options: StepOptions = PLAIN_STEP,
        *,
        reduce: Callable[[StepResult], None] | None = None,
        update: Callable[[], None] | None = None,
        update_stage: UpdateStage | None = None,
        is_measured: bool = False,
    ) -> StepResult:
        """Run this process's part of the table once.

        Clipping, loss scaling and the decision to skip an update need the gradients of all stages. So in a synchronous
        table the last U of a process updates all its stages, after everything else that it does in the step. In an
        asynchronous one each U updates its own stage, and so does each H, in a thread beside the actions after it.

        Args:
            schedule: a valid table for these stages and this many micro-batches.
            micro_batches: the same on every process.
            options: of this step.
            reduce: called at the process's last U or H with the results so far, to complete gradients and loss
                together with the other processes. Its time counts as waiting.
            update: called after `reduce`. Its errors are raised unchanged.
            update_stage: called at each U of an asynchronous table, in place of these two; and at each H, before them.
            is_measured: whether to note when each action ran.

        Raises:
            StageError: an action failed; names the process, the stage, the action and the micro-batch. A pipeline of
                one process can run the next step after it, unless the table has H or several steps: then some stages
                are updated and others are not. One of several processes cannot.
            HfGpipeError: a step failed before, in a pipeline of several processes.
        """
        for channel in self._channels:
            channel.check()
        for stage in self._every_stage:
            if stage.head is not None:
                stage.head.begin(options)
        result = StepResult()
        # Those of other replicas stay on the host.
        indices = {index for worker in self._rows for index in schedule.micro_batches_of(worker)}
        shares = on_devices([micro_batches[index] for index in sorted(indices)], self._devices)
        self.prepare(schedule)
        if self._replicas is not None and any(kind.takes_gradient for kind in schedule.kinds):
            self._replicas.check(schedule, len(micro_batches))
        actions = [planned.action for planned in self._planned]
        for versions in self._versions.values():
            versions.begin()
        timer = Timer(self._devices) if is_measured else None
        note = timer.mark if timer is not None else NamedRanges().mark if is_profiled() else _not_measured
        complete = partial(self._complete, micro_batches, result, reduce, timer)
        step = Step(
            schedule,
            shares,
            options,
            result,
            self._replicas,
            self._versions,
            complete,
            update,
            update_stage,
            timer,
            self._collect,
            partial(self._send_after, micro_batches),
            self._update_beside,
        )
        action = None
        # The clock of a worker. Each action of its row has three phases, between four marks; what an action waits for
        # was sent by an action of a neighbour, whenever that came:
        #
        #     mark          mark         mark      mark
        #      |  1 receive  |  2 compute  |  3 send  |      the next action
        #           |                           |
        #           waits for a message         hands its message over, and does not wait
        try:
            for planned in self._planned:
                # 1. Receive: start what comes soon, and wait for what this action needs.
                action, device = planned.action, planned.device
                self._beside.check()
                # A thread notes the times of what it does.
                mark = note if action.kind.resource is not Resource.HOST else _not_measured
                mark(action, device)
                for incoming in planned.expected:
                    incoming.channel.expect(incoming.key, incoming.shapes(micro_batches[incoming.key[0]]))
                received: dict[str, torch.Tensor] = {}
                for incoming in planned.received:
                    received |= incoming.channel.receive(incoming.key)
                    for channel, key in incoming.arrived:
                        channel.arrived(key)
                if planned.wait is not None and not planned.received:
                    planned.wait(step, planned)
                # 2. Compute.
                mark(action, device)
                message = planned.run(step, planned, received)
                # 3. Send.
                mark(action, device)
                _send(planned, message, micro_batches)
                if message and not planned.sent:
                    result.outputs[planned.index] = message
                mark(action, device)
                # Free the tensors before the process waits for its next message.
                del received, message
            self._flush()
        except Exception as error:
            if step.is_updating:  # everything was sent and received
                raise
            with suppress(Exception):  # of what has failed already
                self._reset()
            if isinstance(error, StageError):  # of a thread, which says where
                raise
            where = f"stage {action.stage}, action {action}" if action is not None else "before the first action"
            row = row_around(actions, action) if action is not None else ""
            raise StageError(f"process {min(self._rows)}, {where}: {type(error).__name__}: {error}{row}") from error
        for versions in self._versions.values():
            versions.end()
        result.stash_bytes = sum(versions.most_bytes for versions in self._versions.values())
        if timer is not None:
            result.times += timer.read()
        return result

    def _complete(
        self,
        micro_batches: Sequence[MicroBatch],
        result: StepResult,
        reduce: Callable[[StepResult], None] | None,
        timer: Timer | None,
    ) -> None:
        """Before the update: wait until everything was computed and sent, then call `reduce`."""
        self._flush()
        mini_batches = [micro_batch.mini_batch for micro_batch in micro_batches]
        for row in self._rows.values():
            for number, stage in sorted(row.stages.items()):
                stage.end_step(mini_batches, None if self._replicas is None else partial(self._replicas.total, number))
        self._collect()
        if timer is not None:
            timer.synchronize()
        if reduce is not None:
            reduce(result)

    def _collect(self) -> None:
        """Wait until the gradients of weights that visit are on the host, and of dealt stages those of all workers."""
        for row in self._rows.values():
            row.visits.finish()
        if self._homes is not None:
            self._homes.collect()

    def _is_read(self, schedule: Schedule, source: Action, consumer: Action) -> bool:
        """Whether a message is sent: gradients that no earlier stage needs are not; nor is that a visit is over, which
        a process knows of its own workers."""
        if source.kind.is_of_visit:
            return not {schedule.worker_of(source), schedule.worker_of(consumer)} <= self._workers
        if source.kind.takes_gradient:
            return any(self._rows[schedule.worker_of(consumer)].stages[consumer.stage].trainable_outputs.values())
        return True

    def prepare(self, schedule: Schedule) -> None:
        """Derive from a table, once, the receives and the last backwards of this process.

        Raises UserError if a stage cannot run its I and W.
        """
        if schedule is self._table:
            return
        expected, senders = defaultdict(list), set[int]()
        for message in messages(schedule):
            is_incoming = message.receiver in self._workers and message.sender not in self._workers
            if is_incoming and self._is_read(schedule, message.source, message.consumer):
                incoming = self._message(schedule, message.source, message.consumer)
                expected[message.receiver, message.before].append(incoming)
                senders.add(message.sender)
        arrived = self._arrived(schedule, senders)
        self._planned = []
        self._versions = {}
        read: dict[int, Sequence[Use | None]] = {}
        for worker, row in self._rows.items():
            for number in {number for number, _ in schedule.split} & row.stages.keys():
                row.stages[number].model.defer_weight_gradients()
            if schedule.is_asynchronous:
                read[worker] = uses(schedule, worker)
                self._versions = {n: Versions(stage.model.parameters.values()) for n, stage in row.stages.items()}
        actions = in_rows(schedule, self._workers)
        # Other workers add to the gradients of a dealt stage.
        last = frozenset() if schedule.placement.is_dealt else last_backwards([action for _, action in actions])
        if not schedule.is_asynchronous:
            last |= {*[action for _, action in actions if action.kind.changes_weights][-1:]}
        places: Counter[int] = Counter()
        for worker, action in actions:
            place = places[worker]
            places[worker] += 1
            use = read[worker][place] if worker in read else None
            row = self._rows[worker]
            stage, (run, wait) = row.stages[action.stage], performed(action.kind)
            if LOAD in schedule.kinds and action.micro_batch is not None:
                run = visiting(run)
            is_beside = action.kind.resource is Resource.HOST
            received = tuple(
                replace(self._message(schedule, source, action), arrived=arrived.get((source, action), ()))
                for source in schedule.sources(action)
                if self._is_read(schedule, source, action)
            )
            planned = Planned(
                action=action,
                index=_index(action),
                stage=stage,
                visits=row.visits,
                copies=self._copies[stage.device],
                device=stage.device,
                run=run if use is None or not action.kind.reads_weights else reading(run),
                wait=wait,
                expected=tuple(expected[worker, place]),
                received=() if is_beside else received,
                received_beside=received if is_beside else (),
                sent=tuple(
                    self._message(schedule, action, other)
                    for other in schedule.consumers(action)
                    if not action.kind.takes_gradient or any(stage.trainable_inputs.values())
                    if not action.kind.is_of_visit or self._is_read(schedule, action, other)
                ),
                use=use,
                is_last=action in last,
                is_moving=schedule.is_moving(action),
            )
            self._planned.append(planned)
        self._table = schedule

    def _arrived(self, schedule: Schedule, senders: Collection[int]) -> dict[tuple[Action, Action], Sent]:
        """For each message to this process, as (source, consumer), those of this process that had come before the
        source ran: the sender's row has their consumers before it."""
        result: dict[tuple[Action, Action], Sent] = {}
        for worker in senders:
            come: list[tuple[Channel, tuple[int, int]]] = []
            for action in schedule.actions[worker]:
                for source in schedule.sources(action):
                    if schedule.worker_of(source) in self._workers and not source.kind.is_of_visit:
                        message = self._message(schedule, source, action)
                        come.append((message.channel, message.key))
                for consumer in schedule.consumers(action) if come else ():
                    if schedule.worker_of(consumer) in self._workers and self._is_read(schedule, action, consumer):
                        result[action, consumer], come = tuple(come), []
        return result

    def _message(self, schedule: Schedule, source: Action, consumer: Action) -> Message:
        """The message of an action to another one, between the workers in whose rows they stand."""
        sender, receiver = schedule.worker_of(source), schedule.worker_of(consumer)
        is_sender = sender in self._workers
        if source.kind.is_of_visit:
            relay = self._relays[source.stage, sender, receiver]
            return Message(relay, (_index(consumer), 0), lambda _: {"done": (1,)})
        key = _index(source), source.kind.turn
        stages = self._rows[sender if is_sender else receiver].stages
        if source.kind.turn or consumer.kind.turn:
            head = stages[source.stage if is_sender else consumer.stage].head
            assert head is not None, "the stage has no part of the head"
            if source.stage < consumer.stage:
                return Message(self._head_edges[source.stage, sender, receiver].down, key, partial(head.shapes, source))
            return Message(self._head_edges[consumer.stage, receiver, sender].up, key, partial(head.shapes, source))
        # The shapes are those at the boundary between the two stages, whichever end asks for them.
        lower, upper = sorted((source.stage, consumer.stage))
        if source.kind.takes_gradient:
            channel = self._edges[lower, receiver, sender].up
            shapes = stages[upper].input_gradient_shapes if is_sender else stages[lower].output_gradient_shapes
        else:
            channel = self._edges[lower, sender, receiver].down
            shapes = stages[lower].output_shapes if is_sender else stages[upper].input_shapes
        return Message(channel, key, shapes)

    def _send_after(
        self, micro_batches: Sequence[MicroBatch], wait: Callable[[], None], planned: Planned, message: Tensors
    ) -> None:
        """Send an action's message once `wait` returns. The host goes on: else the worker's next action would begin
        late, though its device is free."""

        def send() -> None:
            wait()
            _send(planned, message, micro_batches)

        self._beside.begin(Resource.COPY_OUT, planned.action, send)

    def _update_beside(self, step: Step, planned: Planned) -> None:
        """Update a dealt stage in a thread, once its gradients are at home. The host goes on."""
        ways = [wait for row in self._rows.values() if (wait := row.visits.way_home()) is not None]

        def update() -> None:
            assert step.update_stage is not None, "a table with H needs update_stage"
            come = time.perf_counter()
            for wait in ways:
                wait()
            for incoming in planned.received_beside:
                incoming.channel.receive(incoming.key)
            if self._homes is not None:
                self._homes.collect_stage(planned.action.stage)
            begun = time.perf_counter()
            step.update_stage(planned.action.stage, planned.action.step)
            if step.timer is not None:
                step.result.times.append(ActionTime(planned.action, come, time.perf_counter(), begun - come))

        self._beside.begin(Resource.HOST, planned.action, update)

    def _flush(self) -> None:
        """Wait until the threads are done, and all messages have been sent."""
        self._beside.finish()
        for channel in self._channels:
            channel.flush()

    def _reset(self) -> None:
        """Drop the micro-batches and messages of a failed step, so that the next one does not get them."""
        for versions in self._versions.values():
            versions.end()
        for copies in self._copies.values():
            copies.reset()
        for row in self._rows.values():
            for stage in row.stages.values():
                stage.reset()
            row.visits.reset()
        self._beside.reset()
        for channel in self._channels:
            channel.reset()


def _send(planned: Planned, message: Tensors, micro_batches: Sequence[MicroBatch]) -> None:
    for outgoing in planned.sent:
        shapes = outgoing.shapes(micro_batches[outgoing.key[0]])
        if message or not shapes:  # of some micro-batches nothing crosses a boundary
            outgoing.channel.send(outgoing.key, message, shapes)


def last_backwards(actions: Sequence[Action]) -> frozenset[Action]:
    """The last B or W of each stage, where its G can begin: no other G stands between the two, for order matters."""
    last = set()
    since: dict[int, Action] = {}
    for action in actions:
        if action.kind.completes_micro_batch:
            since[action.stage] = action
        elif action.kind.is_collective:
            if action.stage in since:
                last.add(since[action.stage])
            since.clear()
    return frozenset(last)


def row_around(actions: Sequence[Action], action: Action, most: int = 4) -> str:
    """Text for a message: the actions of a worker's row around one of them, which is marked."""
    place = actions.index(action)
    first, stop = max(place - most, 0), min(place + most + 1, len(actions))
    words = [f">{other}<" if other == action else str(other) for other in actions[first:stop]]
    before, after = "... " if first else "", " ..." if stop < len(actions) else ""
    return f" (action {place + 1} of {len(actions)} of this process: {before}{' '.join(words)}{after})"


def _not_measured(action: Action, device: torch.device) -> None:
    """Stands for `Timer.mark` in a step that is not measured."""


def _index(action: Action) -> int:
    """The number of its micro-batch; -1 of an action that concerns a step."""
    return -1 if action.micro_batch is None else action.micro_batch
