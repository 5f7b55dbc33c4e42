"""How the executor performs each kind of action: one function for each, and one for what some of them wait for.

`add_kind` adds a kind with both of its sides: what the table must know of it, and what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from hf_gpipe.errors import UserError
from hf_gpipe.runtime.channel import Channel, Shapes
from hf_gpipe.runtime.divided_head import HeadPart
from hf_gpipe.runtime.micro_batch import Context, MicroBatch, StepOptions
from hf_gpipe.runtime.offload import HostCopies
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime, Timer
from hf_gpipe.runtime.versions import Versions
from hf_gpipe.runtime.visits import VisitingWeights
from hf_gpipe.schedule import kinds
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import ActionKind
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.versions import Use

Tensors: TypeAlias = dict[str, torch.Tensor]
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

    outputs: dict[int, Tensors] = field(default_factory=dict)
    times: list[ActionTime] = field(default_factory=list)
    stash_bytes: int = 0

    @property
    def loss(self) -> torch.Tensor | None:
        """The sum of the micro-batches' losses; None in processes without the last stage. Where that is dealt, several
        devices may have some of them."""
        losses = [output["loss"] for output in self.outputs.values()]
        losses = [loss.to(losses[0].device, non_blocking=True) for loss in losses]
        return sum(losses[1:], losses[0]) if losses else None


Sent = tuple[tuple[Channel, tuple[int, int]], ...]
"""Channel and key of several messages."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of one action, as far as the table tells it."""

    channel: Channel
    key: tuple[int, int]
    """The number of the micro-batch, and the turn of the action that sends it: of an edge's messages at one time."""
    shapes: Callable[[MicroBatch], Shapes]
    arrived: Sent = ()
    """Of a message that is received: those of this process that had come before its source ran."""


@dataclass(slots=True)
class Step:
    """One run of a table in this process: what its actions read and add to."""

    schedule: Schedule
    shares: Mapping[torch.device, Mapping[int, MicroBatch]]
    """The micro-batches of this process on each of its devices."""
    options: StepOptions
    result: StepResult
    replicas: Replicas | None
    versions: Mapping[int, Versions]
    """Of each stage, in an asynchronous table."""
    complete: Callable[[], None]
    """Waits until everything was computed and sent, then reduces."""
    update: Callable[[], None] | None
    update_stage: UpdateStage | None
    timer: Timer | None
    collect: Callable[[], None]
    """Waits until gradients of visiting weights are on the host, of dealt stages those of all workers."""
    send_after: Callable[[Callable[[], None], Planned, Tensors], None]
    """(wait, action, message) -> None: sends an action's message once `wait` returns, beside the actions after it."""
    update_beside: Callable[[Step, Planned], None]
    """Updates a dealt stage once its gradients are on the host, beside the actions after it."""
    is_updating: bool = False
    """Whether `update` runs, whose errors are the caller's own."""


Run: TypeAlias = Callable[[Step, "Planned", Tensors], Tensors]
"""(step, action, tensors received) -> the tensors for the neighbouring stage, or the outputs of the last stage."""


class Performed(NamedTuple):
    """How a kind of action is performed."""

    run: Run
    wait: Callable[[Step, Planned], None] | None = None
    """Waits before an action runs that receives no message."""


@dataclass(frozen=True, slots=True)
class Planned:
    """An action of this process with all that follows from the table, looked up once for all steps."""

    action: Action
    index: int
    """Number of the micro-batch; -1 for an action that concerns a step."""
    stage: Stage
    visits: VisitingWeights
    """Of the weights of the worker's stages, in a table with L and D."""
    copies: HostCopies
    """Of what graphs save on the stage's device, in a table with O and P."""
    device: torch.device
    run: Run
    wait: Callable[[Step, Planned], None] | None
    expected: tuple[Message, ...]
    """Those whose receive starts before the action."""
    received: tuple[Message, ...]
    """Its own messages."""
    received_beside: tuple[Message, ...]
    """Those of an action that waits for them beside the others."""
    sent: tuple[Message, ...]
    """The messages that its result is, unless the result is empty."""
    use: Use | None
    """The version of the weights that it reads or replaces; None of a reduction, and in a synchronous table."""
    is_last: bool
    """Of U or H: whether it is the process's last one. Of a B or W: whether its stage's G can begin in it."""
    is_moving: bool
    """Whether forward and backward of its micro-batch are on different workers, where the stage is dealt."""


def _forward(step: Step, planned: Planned, received: Tensors) -> Tensors:
    context = Context(step.shares[planned.device][planned.index], received, step.options)
    if step.schedule.is_training:
        where = planned.action.stage, planned.index
        keep_graph, is_offloaded = step.schedule.keeps_graph(*where), step.schedule.is_offloaded(*where)
        message = planned.stage.forward(context, keep_graph=keep_graph, is_offloaded=is_offloaded)
        if planned.is_moving:
            planned.stage.give(planned.index)
        return message
    return planned.stage.evaluate(context)


def _recompute(step: Step, planned: Planned, received: Tensors) -> Tensors:
    if planned.is_moving:
        planned.stage.take(Context(step.shares[planned.device][planned.index], received, step.options))
    planned.stage.recompute(planned.index)
    return {}


def _backward(step: Step, planned: Planned, received: Tensors) -> Tensors:
    if step.replicas is None or not planned.is_last:
        return planned.stage.backward(planned.index, received)
    with step.replicas.in_last_backward(planned.action.stage):
        return planned.stage.backward(planned.index, received)


def _input(step: Step, planned: Planned, received: Tensors) -> Tensors:
    return planned.stage.input_backward(planned.index, received)


def _weight(step: Step, planned: Planned, received: Tensors) -> Tensors:
    stage, before = planned.stage, None
    if step.replicas is not None and planned.is_last:
        before = step.replicas.before_last_weights(planned.action.stage, stage.deferred(planned.index))
    stage.weight_backward(planned.index, before)
    return {}


def _context(step: Step, planned: Planned, received: Tensors) -> tuple[HeadPart, Context]:
    assert planned.stage.head is not None, "the stage has no part of the head"
    return planned.stage.head, Context(step.shares[planned.device][planned.index], received, step.options)


def _logits(step: Step, planned: Planned, received: Tensors) -> Tensors:
    head, context = _context(step, planned, received)
    message, outputs = head.score(context, is_training=step.schedule.is_training)
    if outputs:
        step.result.outputs[planned.index] = outputs
    return message


def _logits_gradient(step: Step, planned: Planned, received: Tensors) -> Tensors:
    head, context = _context(step, planned, received)
    return head.add_gradient(context)


def _await_gradients(step: Step, planned: Planned) -> None:
    if step.schedule.placement.is_dealt:
        step.collect()


def _reduce(step: Step, planned: Planned, received: Tensors) -> Tensors:
    assert step.replicas is not None, "the stage has no replicas"
    step.replicas.start(planned.action.stage)
    return {}


def _await_update(step: Step, planned: Planned) -> None:
    if planned.use is None:
        if planned.is_last:
            step.complete()
    elif step.replicas is not None:
        step.replicas.finish(planned.action.stage)


def _update(step: Step, planned: Planned, received: Tensors) -> Tensors:
    if planned.use is not None:
        assert step.update_stage is not None, "an asynchronous table needs update_stage"
        with step.versions[planned.action.stage].updating(keeps=not planned.use.is_last):
            step.update_stage(planned.action.stage, planned.action.step)
    elif planned.is_last and step.update is not None:
        step.is_updating = True
        step.update()
        step.is_updating = False
        if step.timer is not None:
            step.timer.synchronize()
    return {}


def _await_host_updates(step: Step, planned: Planned) -> None:
    step.update_beside(step, planned)
    if planned.is_last:
        step.complete()


def _load(step: Step, planned: Planned, received: Tensors) -> Tensors:
    planned.visits.load(planned.action.stage)
    return {}


def _drop(step: Step, planned: Planned, received: Tensors) -> Tensors:
    planned.visits.drop(planned.action.stage)
    if not planned.sent:
        return {}
    done = {"done": torch.ones(1, dtype=torch.uint8)}
    if (wait := planned.visits.way_home()) is None:
        return done
    step.send_after(wait, planned, done)
    return {}


def _offload(step: Step, planned: Planned, received: Tensors) -> Tensors:
    planned.copies.leave(planned.stage.saved(planned.index))
    return {}


def _prefetch(step: Step, planned: Planned, received: Tensors) -> Tensors:
    planned.copies.come(planned.stage.saved(planned.index))
    return {}


def visiting(run: Run) -> Run:
    """The same in a visit of the stage's weights, in a table with L and D."""

    def run_in_visit(step: Step, planned: Planned, received: Tensors) -> Tensors:
        planned.visits.enter(planned.action.stage, adds_gradients=planned.action.kind.completes_micro_batch)
        return run(step, planned, received)

    return run_in_visit


def reading(run: Run) -> Run:
    """The same in the version of the stage's weights that the action reads, in an asynchronous table."""

    def run_in_version(step: Step, planned: Planned, received: Tensors) -> Tensors:
        assert planned.use is not None
        version, is_last = planned.use
        with step.versions[planned.action.stage].reading(version, is_last=is_last):
            return run(step, planned, received)

    return run_in_version


PERFORMED: dict[str, Performed] = {
    kinds.FORWARD: Performed(_forward),
    kinds.RECOMPUTE: Performed(_recompute),
    kinds.BACKWARD: Performed(_backward),
    kinds.INPUT: Performed(_input),
    kinds.WEIGHT: Performed(_weight),
    kinds.LOGITS: Performed(_logits),
    kinds.LOGITS_GRADIENT: Performed(_logits_gradient),
    kinds.REDUCE: Performed(_reduce, _await_gradients),
    kinds.UPDATE: Performed(_update, _await_update),
    kinds.HOST_UPDATE: Performed(_update, _await_host_updates),
    kinds.LOAD: Performed(_load),
    kinds.DROP: Performed(_drop),
    kinds.OFFLOAD: Performed(_offload),
    kinds.PREFETCH: Performed(_prefetch),
}


def performed(kind: ActionKind) -> Performed:
    """How a kind is performed. Raises UserError where that is not known."""
    if kind not in PERFORMED:
        raise UserError(
            f"the executor cannot perform the action kind {kind} ({kind.word}); add it by "
            "hf_gpipe.runtime.performing.add_kind, with the function that performs it."
        )
    return PERFORMED[kind]


def add_kind(kind: ActionKind, run: Run, wait: Callable[[Step, Planned], None] | None = None) -> ActionKind:
    """Add a kind of action to tables and to the executor; returns it.

    Args:
        kind: its record.
        run: what an action of the kind does; it returns {} where it sends nothing.
        wait: what it waits for before that, unless it receives a message.

    Raises:
        ScheduleError: as `hf_gpipe.schedule.kinds.add_kind`.
    """
    PERFORMED[kinds.add_kind(kind)] = Performed(run, wait)
    return kind
