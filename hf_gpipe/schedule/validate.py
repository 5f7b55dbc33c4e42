"""Checks that a table can be run: complete, in order, and free of deadlock.

The checks go from simple to subtle, so that the first error is the one to correct first:

1. the table's shape fits its placement, and every action stands on its stage's process, once;
2. nothing is missing: one F for every (stage, micro-batch), and in training one B, and one U per stage;
3. within a process, an action comes after what it needs of its own stage, and updates come last: clipping and tied
   parameters need the gradients of all stages, so no update may stand before another stage's backward;
4. between two processes, messages are received in the order in which they are sent, for an edge keeps no other order;
5. run one action after another, every process reaches its end. Then it does so too if every send and every receive
   blocks, because of the points at which `messages` starts the receives.
"""

from __future__ import annotations

from typing import NoReturn

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action, ActionKind
from hf_gpipe.schedule.messages import executable_order
from hf_gpipe.schedule.table import Schedule


def check_table(schedule: Schedule) -> None:
    """Check that a table is a complete synchronous step which every process can run to its end.

    Args:
        schedule: the table.

    Raises:
        ScheduleError: names the first wrong action and what it lacks; its `line` is the line of that process.
    """
    _check_shape(schedule)
    positions = _check_places(schedule)
    _check_complete(schedule, positions)
    _check_order_in_process(schedule, positions)
    _check_order_on_edges(schedule)
    for _ in executable_order(schedule):
        pass


def _fail(schedule: Schedule, problem: str, where: int | str) -> NoReturn:
    """`where` is the process, or the key of the line, that is wrong."""
    raise ScheduleError(
        f"schedule {schedule.name!r}: {problem}", where if isinstance(where, str) else f"process {where}"
    )


def _check_shape(schedule: Schedule) -> None:
    num_stages, num_micro_batches, placement = schedule.num_stages, schedule.num_micro_batches, schedule.placement
    if num_stages < 1 or num_micro_batches < 1:
        _fail(
            schedule,
            f"num_stages is {num_stages} and num_micro_batches is {num_micro_batches}; both must be at least 1.",
            "num_stages" if num_stages < 1 else "num_micro_batches",
        )
    if placement.num_stages != num_stages:
        _fail(
            schedule,
            f"the placement is of {placement.num_stages} stages and the table of {num_stages}; name one process for "
            "each stage.",
            "placement",
        )
    if placement.num_processes != len(schedule.actions):
        _fail(
            schedule,
            f"the placement is on {placement.num_processes} processes and the table has the actions of "
            f"{len(schedule.actions)}; give each process of the placement its line.",
            placement.num_processes if placement.num_processes < len(schedule.actions) else "placement",
        )


def _check_places(schedule: Schedule) -> dict[Action, int]:
    """The place of each action in its process's list."""
    positions: dict[Action, int] = {}
    for process, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < schedule.num_stages:
                _fail(
                    schedule, f"{action} on process {process}: the stages are 0 to {schedule.num_stages - 1}.", process
                )
            if action.micro_batch is not None and not 0 <= action.micro_batch < schedule.num_micro_batches:
                _fail(
                    schedule,
                    f"{action} on process {process}: the micro-batches are 0 to {schedule.num_micro_batches - 1}.",
                    process,
                )
            home = schedule.placement.process_of(action)
            if home != process:
                _fail(
                    schedule,
                    f"{action} is on process {process}, but stage {action.stage} is placed on {home}; move it there.",
                    process,
                )
            if action in positions:
                _fail(schedule, f"{action} occurs twice on process {process}; keep one of them.", process)
            positions[action] = index
    return positions


def _check_complete(schedule: Schedule, positions: dict[Action, int]) -> None:
    required = [ActionKind.FORWARD, ActionKind.BACKWARD] if schedule.is_training else [ActionKind.FORWARD]
    for kind in required:
        for stage in range(schedule.num_stages):
            for micro_batch in range(schedule.num_micro_batches):
                action = Action(kind, stage, micro_batch)
                if action not in positions:
                    home = schedule.placement.process_of(action)
                    _fail(schedule, f"{action} is missing from process {home}; it must occur exactly once.", home)
    if schedule.is_training:
        for stage in range(schedule.num_stages):
            if (update := Action(ActionKind.UPDATE, stage)) not in positions:
                home = schedule.placement.process_of(update)
                _fail(
                    schedule, f"{update} is missing from process {home}; a training step updates each stage once.", home
                )
    else:
        for action in positions:
            if action.kind != ActionKind.FORWARD:
                _fail(
                    schedule,
                    f"{action} without any backward: a table without backwards has forwards only.",
                    schedule.placement.process_of(action),
                )


def _check_order_in_process(schedule: Schedule, positions: dict[Action, int]) -> None:
    for process, actions in enumerate(schedule.actions):
        first_update: Action | None = None
        for index, action in enumerate(actions):
            for needed in _needs_of_own_stage(action, positions, schedule.num_micro_batches):
                if positions[needed] > index:
                    _fail(
                        schedule,
                        f"{action} comes before {needed}, which it needs, on process {process}; move it behind.",
                        process,
                    )
            if action.kind == ActionKind.UPDATE:
                first_update = first_update or action
            elif first_update is not None:
                _fail(
                    schedule, f"{action} comes after {first_update} on process {process}: updates come last.", process
                )


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
    """Messages of one kind from a stage on one process to a stage on another are received in the order of sending."""
    placement, num_stages = schedule.placement, schedule.num_stages
    sent: dict[tuple[ActionKind, int, int, int], list[Action]] = {}
    received: dict[tuple[ActionKind, int, int, int], list[Action]] = {}
    for process, actions in enumerate(schedule.actions):
        for action in actions:
            if (consumer := action.consumer(num_stages)) and placement.process_of(consumer) != process:
                edge = action.kind, action.stage, process, placement.process_of(consumer)
                sent.setdefault(edge, []).append(action)
            if (source := action.source(num_stages)) and placement.process_of(source) != process:
                edge = source.kind, source.stage, placement.process_of(source), process
                received.setdefault(edge, []).append(action)
    for edge, messages in sent.items():
        for sender, receiver in zip(messages, received[edge], strict=True):
            if receiver.source(num_stages) != sender:
                _fail(
                    schedule,
                    f"{receiver} takes the message of {sender}: stage {receiver.stage} must receive in the order in "
                    f"which stage {sender.stage} sends; change one of the two orders.",
                    placement.process_of(receiver),
                )
