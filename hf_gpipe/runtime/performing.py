"""How the executor performs each kind of action: one function for each, and one for what some of them wait for.

`add_kind` adds a kind with both of its sides: what the table must know of it, and what it does.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_gpipe.errors import UserError
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.runtime.step import Performed, Planned, Run, Step, Tensors
from hf_gpipe.schedule import kinds
from hf_gpipe.schedule.kinds import ActionKind


def _forward(step: Step, planned: Planned, received: Tensors) -> Tensors:
    context = step.context(planned, received)
    if step.schedule.is_training:
        message = planned.stage.forward(context, keep_graph=planned.keeps_graph)
        if planned.is_moving:
            planned.stage.give(planned.index)
        return message
    return planned.stage.evaluate(context)


def _recompute(step: Step, planned: Planned, received: Tensors) -> Tensors:
    if planned.is_moving:
        planned.stage.take(step.context(planned, received))
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


def _reduce(step: Step, planned: Planned, received: Tensors) -> Tensors:
    assert step.replicas is not None, "the stage has no replicas"
    step.replicas.start(planned.action.stage)
    return {}


def _await_update(step: Step, planned: Planned) -> None:
    if planned.is_last:
        step.complete()


def update(step: Step, planned: Planned, received: Tensors) -> Tensors:
    """Update the weights of all stages of this process, in the last action of a step that does so."""
    if planned.is_last and step.update is not None:
        step.is_updating = True
        step.update()
        step.is_updating = False
        if step.timer is not None:
            step.timer.synchronize()
    return {}


PERFORMED: dict[str, Performed] = {
    kinds.FORWARD: Performed(_forward),
    kinds.RECOMPUTE: Performed(_recompute),
    kinds.BACKWARD: Performed(_backward),
    kinds.INPUT: Performed(_input),
    kinds.WEIGHT: Performed(_weight),
    kinds.REDUCE: Performed(_reduce),
    kinds.UPDATE: Performed(update, _await_update),
}


def performed(kind: ActionKind) -> Performed:
    """How a kind is performed. Raises UserError where that is not known."""
    parts_of_modes("runtime")  # each adds its own kinds
    if kind not in PERFORMED:
        raise UserError(
            f"the executor cannot perform the action kind {kind} ({kind.word}); add it by "
            "hf_gpipe.runtime.performing.add_kind, with the function that performs it."
        )
    return PERFORMED[kind]


def perform(kind: ActionKind, run: Run, wait: Callable[[Step, Planned], None] | None = None) -> None:
    """Let the executor perform a kind that tables know.

    Args:
        run: what an action of the kind does; it returns {} where it sends nothing.
        wait: what it waits for before that, once its messages have come.
    """
    PERFORMED[kind] = Performed(run, wait)


def add_kind(kind: ActionKind, run: Run, wait: Callable[[Step, Planned], None] | None = None) -> ActionKind:
    """Add a kind of action to tables and to the executor; returns it.

    Args:
        kind: its record.
        run, wait: as for `perform`.

    Raises:
        ScheduleError: as `hf_gpipe.schedule.kinds.add_kind`.
    """
    perform(kinds.add_kind(kind), run, wait)
    return kind
