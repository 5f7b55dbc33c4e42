"""The actions of a table that this process performs, each with its messages and all else that follows from the table.

Receives are started ahead, at the points that `hf_gpipe.schedule.messages` derives from the table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_gpipe.runtime.channel import Channel
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.performing import performed
from hf_gpipe.runtime.step import Message, ModeState, Planned, Rows, Sent
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Resource
from hf_gpipe.schedule.messages import in_rows, messages
from hf_gpipe.schedule.table import Schedule


@dataclass(frozen=True)
class Wiring:
    """The stages of this process, and what connects them to others.

    Attributes:
        rows, edges, modes: as of `Executor`.
    """

    rows: Rows
    edges: Edges
    modes: Mapping[str, ModeState]

    def planned(self, schedule: Schedule) -> list[Planned]:
        """The actions of this process, in the order in which it performs them."""
        own = self.rows.keys()
        expected, senders = defaultdict(list), set[int]()
        for message in messages(schedule):
            is_incoming = message.receiver in own and message.sender not in own
            if is_incoming and self._is_read(schedule, message.source, message.consumer):
                incoming = self._message(schedule, message.source, message.consumer)
                expected[message.receiver, message.before].append(incoming)
                senders.add(message.sender)
        arrived = self._arrived(schedule, senders)
        actions = in_rows(schedule, own)
        # Other workers add to the gradients of a shared stage.
        last = frozenset() if schedule.placement.is_shared else last_backwards([action for _, action in actions])
        if not schedule.is_window:
            last |= {*[action for _, action in actions if action.kind.changes_weights][-1:]}
        places: Counter[int] = Counter()
        result = []
        for worker, action in actions:
            place = places[worker]
            places[worker] += 1
            stage, how = self.rows[worker][action.stage], performed(action.kind)
            for mode in self.modes.values():
                how = mode.wrap(schedule, worker, action, how)
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
                worker=worker,
                device=stage.device,
                run=how.run,
                wait=how.wait,
                expected=tuple(expected[worker, place]),
                received=() if is_beside else received,
                received_in_background=received if is_beside else (),
                sent=tuple(
                    self._message(schedule, action, other)
                    for other in schedule.consumers(action)
                    if not action.kind.takes_gradient or any(stage.trainable_inputs.values())
                    if not action.kind.is_signal or self._is_read(schedule, action, other)
                ),
                is_last=action in last,
                keeps_graph=schedule.keeps_graph(action.stage, _index(action)),
                is_moving=schedule.is_moving(action),
            )
            result.append(planned)
        return result

    def _is_read(self, schedule: Schedule, source: Action, consumer: Action) -> bool:
        """Whether a message is sent.

        Gradients that no earlier stage needs are not sent. A signal is not sent within a process.
        """
        if source.kind.is_signal:
            return not {schedule.worker_of(source), schedule.worker_of(consumer)} <= self.rows.keys()
        if source.kind.takes_gradient:
            return any(self.rows[schedule.worker_of(consumer)][consumer.stage].trainable_outputs.values())
        return True

    def _arrived(self, schedule: Schedule, senders: Collection[int]) -> dict[tuple[Action, Action], Sent]:
        """For each message (source, consumer) to this process, the messages of this process that the sender had
        received before it ran the source, because their consumers stand before the source in its row."""
        result: dict[tuple[Action, Action], Sent] = {}
        for worker in senders:
            come: list[tuple[Channel, tuple[int, int]]] = []
            for action in schedule.actions[worker]:
                for source in schedule.sources(action):
                    if schedule.worker_of(source) in self.rows and not source.kind.is_signal:
                        message = self._message(schedule, source, action)
                        come.append((message.channel, message.key))
                for consumer in schedule.consumers(action) if come else ():
                    if schedule.worker_of(consumer) in self.rows and self._is_read(schedule, action, consumer):
                        result[action, consumer], come = tuple(come), []
        return result

    def _message(self, schedule: Schedule, source: Action, consumer: Action) -> Message:
        """The message of an action to another one, between the workers in whose rows they stand."""
        sender, receiver = schedule.worker_of(source), schedule.worker_of(consumer)
        for mode in self.modes.values():
            if (message := mode.message(source, consumer, sender, receiver)) is not None:
                return message
        is_sender = sender in self.rows
        key = _index(source), source.kind.turn
        stages = self.rows[sender if is_sender else receiver]
        # The shapes are those at the boundary between the two stages, whichever end asks for them.
        lower, upper = sorted((source.stage, consumer.stage))
        if source.kind.takes_gradient:
            channel = self.edges[lower, receiver, sender].up
            shapes = stages[upper].input_gradient_shapes if is_sender else stages[lower].output_gradient_shapes
        else:
            channel = self.edges[lower, sender, receiver].down
            shapes = stages[lower].output_shapes if is_sender else stages[upper].input_shapes
        return Message(channel, key, shapes)


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


def _index(action: Action) -> int:
    """The number of its micro-batch; -1 of an action that concerns a step."""
    return -1 if action.micro_batch is None else action.micro_batch
