"""Whether a table can be run: complete, in order, and free of deadlock.

The checks go from the plain to the subtle, so that the first error is the one to mend first:

1. the table's shape fits its placement, and every action stands on its stage's process, once;
2. nothing is missing: one F for every (stage, micro-batch), and in training one B, and one U a stage;
3. within a process, an action comes after what it needs of its own stage, and updates come last: clipping and tied
   parameters need the gradients of all stages, so no update may stand before another stage's backward;
4. between two processes, messages are received in the order in which they are sent, for an edge keeps no other order;
5. run one action after another, every process reaches its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action, ActionKind

if TYPE_CHECKING:
    from hf_gpipe.schedule.table import Schedule


def check_table(schedule: Schedule, rendezvous: bool = False) -> None:
    """Runs all checks; see `Schedule.validate`."""
    _check_shape(schedule)
    positions = _check_places(schedule)
    _check_complete(schedule, positions)
    _check_order_in_process(schedule, positions)
    _check_order_on_edges(schedule)
    for _ in executable_order(schedule, rendezvous):
        pass


def executable_order(schedule: Schedule, rendezvous: bool = False) -> Iterator[tuple[int, Action]]:
    """All actions as (process, action), in an order in which each finds the message that it receives.

    Every process takes its actions in its own order and stops at one whose message has not been sent. Under
    `rendezvous` it also stops after an action until the receiver of that action's message has reached its consumer.

    Raises:
        ScheduleError: the processes wait for each other; names the action at which the first of them stops.
    """
    num_stages = schedule.num_stages
    position = {
        action: (process, index)
        for process, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
    }
    reached = [0] * len(schedule.actions)
    done: set[Action] = set()

    def message_is_taken(process: int, action: Action) -> bool:
        consumer = action.consumer(num_stages)
        if consumer is None:
            return True
        receiver, index = position[consumer]
        return receiver == process or reached[receiver] >= index

    progress = True
    while progress:
        progress = False
        for process, actions in enumerate(schedule.actions):
            while reached[process] < len(actions):
                action = actions[reached[process]]
                if action not in done:
                    source = action.source(num_stages)
                    if source is not None and source not in done:
                        break
                    done.add(action)
                    yield process, action
                if rendezvous and not message_is_taken(process, action):
                    break
                reached[process] += 1
                progress = True

    stopped = []
    for process, actions in enumerate(schedule.actions):
        if reached[process] < len(actions):
            action = actions[reached[process]]
            other = action.consumer(num_stages) if action in done else action.source(num_stages)
            stopped.append(f"process {process} stops at {action}, waiting for {other}")
    if stopped:
        _fail(schedule, f"deadlock{' with blocking sends' if rendezvous else ''}: {'; '.join(stopped[:4])}.")


def _fail(schedule: Schedule, problem: str) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name!r}: {problem}")


def _check_shape(schedule: Schedule) -> None:
    num_stages, num_micro_batches, placement = schedule.num_stages, schedule.num_micro_batches, schedule.placement
    if num_stages < 1 or num_micro_batches < 1:
        _fail(
            schedule,
            f"num_stages is {num_stages} and num_micro_batches is {num_micro_batches}; both must be at least 1.",
        )
    if placement.num_stages != num_stages:
        _fail(schedule, f"the placement is of {placement.num_stages} stages and the table of {num_stages}.")
    if placement.num_processes != len(schedule.actions):
        _fail(
            schedule,
            f"the placement is on {placement.num_processes} processes and the table has the actions of "
            f"{len(schedule.actions)}.",
        )


def _check_places(schedule: Schedule) -> dict[Action, int]:
    """The place of each action in its process's list."""
    positions: dict[Action, int] = {}
    for process, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < schedule.num_stages:
                _fail(schedule, f"{action} on process {process}: the stages are 0 to {schedule.num_stages - 1}.")
            if action.micro_batch is not None and not 0 <= action.micro_batch < schedule.num_micro_batches:
                _fail(
                    schedule,
                    f"{action} on process {process}: the micro-batches are 0 to {schedule.num_micro_batches - 1}.",
                )
            home = schedule.placement.processes[action.stage]
            if home != process:
                _fail(schedule, f"{action} is on process {process}, but stage {action.stage} is placed on {home}.")
            if action in positions:
                _fail(schedule, f"{action} occurs twice on process {process}.")
            positions[action] = index
    return positions


def _check_complete(schedule: Schedule, positions: dict[Action, int]) -> None:
    required = [ActionKind.FORWARD, ActionKind.BACKWARD] if schedule.is_training else [ActionKind.FORWARD]
    for kind in required:
        for stage in range(schedule.num_stages):
            for micro_batch in range(schedule.num_micro_batches):
                action = Action(kind, stage, micro_batch)
                if action not in positions:
                    home = schedule.placement.processes[stage]
                    _fail(schedule, f"{action} is missing from process {home}; it must occur exactly once.")
    if schedule.is_training:
        for stage in range(schedule.num_stages):
            if Action(ActionKind.UPDATE, stage) not in positions:
                home = schedule.placement.processes[stage]
                _fail(schedule, f"{stage}U is missing from process {home}; a training step updates each stage once.")
    else:
        for action in positions:
            if action.kind != ActionKind.FORWARD:
                _fail(schedule, f"{action} without any backward: a table without backwards has forwards only.")


def _check_order_in_process(schedule: Schedule, positions: dict[Action, int]) -> None:
    for process, actions in enumerate(schedule.actions):
        first_update: Action | None = None
        for index, action in enumerate(actions):
            for needed in _needs_of_own_stage(action, positions, schedule.num_micro_batches):
                if positions[needed] > index:
                    _fail(schedule, f"{action} comes before {needed}, which it needs, on process {process}.")
            if action.kind == ActionKind.UPDATE:
                first_update = first_update or action
            elif first_update is not None:
                _fail(schedule, f"{action} comes after {first_update} on process {process}: updates come last.")


def _needs_of_own_stage(action: Action, positions: dict[Action, int], num_micro_batches: int) -> list[Action]:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == ActionKind.RECOMPUTE:
        return [Action(ActionKind.FORWARD, stage, micro_batch)]
    if action.kind == ActionKind.BACKWARD:
        recompute = Action(ActionKind.RECOMPUTE, stage, micro_batch)
        return [recompute if recompute in positions else Action(ActionKind.FORWARD, stage, micro_batch)]
    if action.kind == ActionKind.UPDATE:
        return [Action(ActionKind.BACKWARD, stage, m) for m in range(num_micro_batches)]
    return []


def _check_order_on_edges(schedule: Schedule) -> None:
    """Forwards go down an edge, from stage s to s+1, and backwards go up it; each direction keeps its order."""
    order = {
        (kind, stage): [a for a in schedule.actions[process] if a.kind == kind and a.stage == stage]
        for stage, process in enumerate(schedule.placement.processes)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    }
    for stage in range(schedule.num_stages - 1):
        if schedule.placement.processes[stage] == schedule.placement.processes[stage + 1]:
            continue
        down = zip(order[ActionKind.FORWARD, stage], order[ActionKind.FORWARD, stage + 1], strict=True)
        up = zip(order[ActionKind.BACKWARD, stage + 1], order[ActionKind.BACKWARD, stage], strict=True)
        for sent, received in [*down, *up]:
            if sent.micro_batch != received.micro_batch:
                _fail(
                    schedule,
                    f"{received} takes the message of {sent}: stage {received.stage} must receive in the order in "
                    f"which stage {sent.stage} sends.",
                )
