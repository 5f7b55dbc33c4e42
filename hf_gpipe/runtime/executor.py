"""The executor: interprets the table of any schedule for the stages of this process.

It works the same for every schedule. For each action it receives the message that the action needs, calls the stage,
and sends the result. Receives are started ahead, at the points that `hf_gpipe.schedule.messages` derives from the
table, so messages arrive while the process computes. Sends are waited for only at the end of the table.

In an asynchronous table the weights of a stage change between its actions: each reads the version that the table says
(`hf_gpipe.runtime.versions`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from hf_gpipe.errors import StageError
from hf_gpipe.runtime.channel import Channel, Shapes
from hf_gpipe.runtime.edges import Edge
from hf_gpipe.runtime.micro_batch import PLAIN_STEP, Context, MicroBatch, StepOptions, on_devices
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime, NamedRanges, Timer, is_profiled
from hf_gpipe.runtime.versions import Versions
from hf_gpipe.schedule.actions import Action, ActionKind
from hf_gpipe.schedule.messages import messages
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.versions import Use, uses

UpdateStage = Callable[[int, int], None]
"""(stage, step of the table) -> None: updates the weights of a stage from its gradients, and drops these."""


@dataclass
class StepResult:
    """The results of one run of a table in this process.

    Attributes:
        outputs: the outputs of the last stage for each micro-batch, by its number, in the order of the forwards; empty
            in the other processes.
        times: when each action ran, if that was measured.
        stash_bytes: of an asynchronous table, the most that old versions of weights have held in this process.
    """

    outputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    times: list[ActionTime] = field(default_factory=list)
    stash_bytes: int = 0

    @property
    def loss(self) -> torch.Tensor | None:
        """The sum of the micro-batches' losses; None in processes without the last stage."""
        losses = [one["loss"] for one in self.outputs.values()]
        return sum(losses[1:], losses[0]) if losses else None


@dataclass(frozen=True, slots=True)
class _Message:
    """A message of one action, as far as the table tells it."""

    channel: Channel
    index: int
    """Number of the micro-batch."""
    shapes: Callable[[MicroBatch], Shapes]


@dataclass(frozen=True, slots=True)
class _Planned:
    """An action of this process with all that follows from the table, looked up once for all steps."""

    action: Action
    stage: Stage
    device: torch.device
    expected: tuple[_Message, ...]
    """Those whose receive starts before the action."""
    received: Channel | None
    """Where the action's own message arrives."""
    sent: _Message | None
    """The message that its result is, unless the result is empty."""
    use: Use | None
    """The version of the weights that it reads or replaces; None of a reduction, and in a synchronous table."""


class Executor:
    """Runs tables on the stages of this process.

    Args:
        stages: the stages of this process, by number.
        edges: the edges at the ends of these stages; `edges[s]` lies between stage s and s + 1.
        rank: number of this process.
        replicas: those that these stages have in other processes, if any.
    """

    def __init__(
        self, stages: Mapping[int, Stage], edges: Mapping[int, Edge], rank: int, replicas: Replicas | None = None
    ) -> None:
        self._stages = stages
        self._edges = edges
        self._replicas = replicas
        self._rank = rank
        self._devices = {stage.device for stage in stages.values()}
        self._table: Schedule | None = None
        self._planned: list[_Planned] = []
        self._last_backwards: frozenset[Action] = frozenset()
        #: Of each stage, while the table is asynchronous.
        self._versions: dict[int, Versions] = {}

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
        asynchronous one each U updates its own stage.

        Args:
            schedule: a valid table for these stages and this many micro-batches.
            micro_batches: the same on every process.
            options: of this step.
            reduce: called at the process's last U with the results so far, to complete gradients and loss together with
                the other processes. Its time counts as waiting.
            update: called after `reduce`. Its errors are raised unchanged.
            update_stage: called at each U of an asynchronous table, in place of these two.
            is_measured: whether to note when each action ran.

        Raises:
            StageError: an action failed; names the process, the stage, the action and the micro-batch. A pipeline of
                one process can run the next step after it; one of several cannot.
            HfGpipeError: a step failed before, in a pipeline of several processes.
        """
        for edge in self._edges.values():
            edge.check()
        result = StepResult()
        # Those of other replicas stay on the host.
        own = [micro_batches[index] for index in schedule.micro_batches_of(self._rank)]
        shares = on_devices(own, self._devices)
        actions = schedule.actions[self._rank]
        last_update = None
        if not schedule.is_asynchronous:
            last_update = next((one for one in reversed(actions) if one.kind == ActionKind.UPDATE), None)
        self.prepare(schedule)
        for versions in self._versions.values():
            versions.begin()
        timer = Timer(self._devices) if is_measured else None
        mark = timer.mark if timer is not None else NamedRanges().mark if is_profiled() else _not_measured
        action, is_updating = None, False
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
                mark(action, device)
                for one in planned.expected:
                    one.channel.expect(one.index, one.shapes(micro_batches[one.index]))
                received: dict[str, torch.Tensor] = {}
                if planned.received is not None:
                    received = planned.received.receive(_index(action))
                elif action is last_update:
                    self._complete(result, reduce, timer)
                elif planned.use is not None and action.kind == ActionKind.UPDATE and self._replicas is not None:
                    self._replicas.finish(action.stage)
                # 2. Compute.
                mark(action, device)
                message: dict[str, torch.Tensor] = {}
                if action.kind == ActionKind.REDUCE:
                    assert self._replicas is not None, "the stage has no replicas"
                    self._replicas.start(action.stage)
                elif action.kind != ActionKind.UPDATE:
                    micro_batch = shares[device][_index(action)]
                    with self._reading(planned):
                        message = self._perform(schedule, action, planned.stage, micro_batch, received, options)
                elif planned.use is not None:
                    assert update_stage is not None, "an asynchronous table needs update_stage"
                    with self._versions[action.stage].updating(keeps=not planned.use.is_last):
                        update_stage(action.stage, action.step)
                elif action is last_update and update is not None:
                    is_updating = True
                    update()
                    is_updating = False
                    if timer is not None:
                        timer.synchronize()
                # 3. Send.
                mark(action, device)
                if message and planned.sent is not None:
                    one = planned.sent
                    one.channel.send(one.index, message, one.shapes(micro_batches[one.index]))
                elif message:
                    result.outputs[_index(action)] = message
                mark(action, device)
                # Free the tensors before the process waits for its next message.
                del received, message
            self._flush()
        except Exception as error:
            if is_updating:  # everything was sent and received
                raise
            self._reset()
            where = f"stage {action.stage}, action {action}" if action is not None else "before the first action"
            row = row_around(actions, action) if action is not None else ""
            raise StageError(f"process {self._rank}, {where}: {type(error).__name__}: {error}{row}") from error
        for versions in self._versions.values():
            versions.end()
        result.stash_bytes = sum(versions.most_bytes for versions in self._versions.values())
        if timer is not None:
            result.times = timer.read()
        return result

    def _reading(self, planned: _Planned) -> AbstractContextManager[None]:
        """Context manager in which a stage has the weights that an action reads."""
        if planned.use is None:
            return nullcontext()
        return self._versions[planned.action.stage].reading(planned.use.version, is_last=planned.use.is_last)

    def _complete(self, result: StepResult, reduce: Callable[[StepResult], None] | None, timer: Timer | None) -> None:
        """Before the update: wait until everything was computed and sent, then call `reduce`."""
        self._flush()
        for stage in self._stages.values():
            stage.end_step()
        if timer is not None:
            timer.synchronize()
        if reduce is not None:
            reduce(result)

    def _perform(
        self,
        schedule: Schedule,
        action: Action,
        stage: Stage,
        micro_batch: MicroBatch,
        received: dict[str, torch.Tensor],
        options: StepOptions,
    ) -> dict[str, torch.Tensor]:
        """Run F, R, B, I or W. Returns the tensors for the neighbouring stage; F of the last stage its outputs."""
        index = micro_batch.index
        if action.kind == ActionKind.RECOMPUTE:
            stage.recompute(index)
            return {}
        if action.kind == ActionKind.BACKWARD:
            with self._in_last_backward(action):
                return stage.backward(index, received)
        if action.kind == ActionKind.INPUT:
            return stage.input_backward(index, received)
        if action.kind == ActionKind.WEIGHT:
            stage.weight_backward(index, self._before_last_weights(action))
            return {}
        context = Context(micro_batch, received, options)
        if schedule.is_training:
            return stage.forward(context, keep_graph=schedule.keeps_graph(action.stage, index))
        return stage.evaluate(context)

    def _in_last_backward(self, action: Action) -> AbstractContextManager[None]:
        """Where the process's next G is the stage's own and no B or W of the stage follows, that G begins in this B."""
        if self._replicas is None or action not in self._last_backwards:
            return nullcontext()
        return self._replicas.in_last_backward(action.stage)

    def _before_last_weights(self, action: Action) -> Callable[[torch.nn.Parameter], None] | None:
        """The same for a W, which completes what I has left; returns what W must call with each completed parameter."""
        if self._replicas is None or action not in self._last_backwards:
            return None
        return self._replicas.before_last_weights(action.stage, self._stages[action.stage].deferred(_index(action)))

    def _reads_message(self, action: Action) -> bool:
        stage = self._stages[action.stage]
        if action.kind == ActionKind.FORWARD:
            return not stage.is_first
        return action.kind.takes_gradient and any(stage.trainable_outputs.values())

    def prepare(self, schedule: Schedule) -> None:
        """Derive from a table, once, the receives and the last backwards of this process.

        Raises UserError if a stage cannot run its I and W.
        """
        if schedule is self._table:
            return
        expected = defaultdict(list)
        for message in messages(schedule):
            if message.receiver == self._rank and self._reads_message(message.consumer):
                expected[message.before].append(self._arriving(message.consumer))
        for number in {number for number, _ in schedule.split} & self._stages.keys():
            self._stages[number].model.defer_weight_gradients()
        self._planned = []
        self._versions = {}
        read: Sequence[Use | None] = [None] * len(schedule.actions[self._rank])
        if schedule.is_asynchronous:
            read = uses(schedule, self._rank)
            self._versions = {n: Versions(stage.model.parameters.values()) for n, stage in self._stages.items()}
        for place, (action, use) in enumerate(zip(schedule.actions[self._rank], read, strict=True)):
            stage = self._stages[action.stage]
            received = self._arriving(action).channel if self._reads_message(action) else None
            self._planned.append(
                _Planned(action, stage, stage.device, tuple(expected[place]), received, self._leaving(action), use)
            )
        self._table = schedule
        self._last_backwards = last_backwards(schedule.actions[self._rank])

    def _arriving(self, action: Action) -> _Message:
        """The message that an action reads."""
        stage = self._stages[action.stage]
        if action.kind == ActionKind.FORWARD:
            return _Message(self._edges[action.stage - 1].down, _index(action), stage.input_shapes)
        return _Message(self._edges[action.stage].up, _index(action), stage.output_gradient_shapes)

    def _leaving(self, action: Action) -> _Message | None:
        """The message that an action may send; None for those that never do."""
        stage = self._stages[action.stage]
        if action.kind == ActionKind.FORWARD and not stage.is_last:
            return _Message(self._edges[action.stage].down, _index(action), stage.output_shapes)
        if action.kind.takes_gradient and not stage.is_first:
            return _Message(self._edges[action.stage - 1].up, _index(action), stage.input_gradient_shapes)
        return None

    def _flush(self) -> None:
        """Wait until all messages have been sent."""
        for edge in self._edges.values():
            edge.down.flush()
            edge.up.flush()

    def _reset(self) -> None:
        """Drop the micro-batches and messages of a failed step, so that the next one does not get them."""
        for versions in self._versions.values():
            versions.end()
        for stage in self._stages.values():
            stage.reset()
        for edge in self._edges.values():
            edge.down.reset()
            edge.up.reset()


def last_backwards(actions: Sequence[Action]) -> frozenset[Action]:
    """The last B or W of each stage, where its G can begin: no other G stands between the two, for order matters."""
    found = set()
    since: dict[int, Action] = {}
    for action in actions:
        if action.kind.completes_micro_batch:
            since[action.stage] = action
        elif action.kind == ActionKind.REDUCE:
            if action.stage in since:
                found.add(since[action.stage])
            since.clear()
    return frozenset(found)


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
    assert action.micro_batch is not None, f"{action} has no micro-batch"
    return action.micro_batch
