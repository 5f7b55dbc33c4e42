"""Merges the orders of several stages in one process into one order, by running a clock over the pipeline.

The stages of a process may be on several devices, which work at the same time. The process starts the actions of all
stages, one after another, so it should start them in the order in which they can run: a host that waits for one device,
or is slow, would otherwise keep the others waiting.

A schedule says in which order each stage works, and each replica of a stage takes its own micro-batches out of that
order. A process that holds several stages also needs to know which stage is next. The clock assumes that a backward
takes two ticks and every other action one. Whenever a device is free it starts, among its stages' next actions:

1. an action that has all it needs, and of several the action whose micro-batch is farthest on its way (down the stages,
   then up again). So a boundary goes on to the next process early, and a gradient does not wait in memory. A
   recomputation counts here once its gradient has come, so that its backward follows at once. W comes last, because no
   other process waits for W;
2. else, a recomputation whose gradient is still on its way, the deepest stage first, because the deepest stage gets its
   gradient first. Such a recomputation fills time in which the process would be idle.

Only an action whose messages have been sent is ever appended, so the merged orders cannot deadlock with sends that do
not wait. A stage's own order is kept, so messages still arrive in the order in which they are received.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action, gradient_action
from hf_gpipe.schedule.kinds import INPUT, needs_of
from hf_gpipe.schedule.placement import Placement


def merge(stage_orders: Sequence[Sequence[Action]], placement: Placement) -> list[list[Action]]:
    """The order of each process, from the order of each stage (F, R, B, I and W; kinds with a turn are in further
    orders).

    Of a stage with replicas only the order within each replica counts.

    Raises:
        ScheduleError: the stages wait for each other.
    """
    queues = [queue for order in stage_orders for queue in by_worker(order, placement)]
    process_orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    kinds = {action.kind for queue in queues for action in queue}
    has_turns = any(kind.turn for kind in kinds)
    further_sources = [kind.sources for kind in kinds if kind.sources is not None]
    if len(placement.places) == placement.num_processes and not has_turns:
        for queue in queues:
            process_orders[_worker_of(queue[0], placement)] = queue
        return process_orders

    num_stages = placement.num_stages
    split = {(a.stage, a.micro_batch) for queue in queues for a in queue if a.kind == INPUT}
    #: The kinds that each kind needs of its own stage, where these stand in another order.
    needs = {kind: [need for need in needs_of(kind) if need in kinds and (need.turn or kind.turn)] for kind in kinds}
    next_index = [0] * len(queues)
    of_process: dict[int, list[int]] = {}
    for number, queue in enumerate(queues):
        of_process.setdefault(_worker_of(queue[0], placement), []).append(number)
    free_at: dict[tuple[int, str | None], Fraction | int] = {}
    finished_at: dict[Action, Fraction | int] = {}
    #: The next action of each queue whose next action can start: (start, fills idle time, rank, action, queue).
    choices: dict[int, tuple[Fraction | int, bool, int, Action, int]] = {}
    #: The queues whose next action depends on when an action ends, by that action.
    watching: dict[Action, list[int]] = {}

    def look_at(number: int) -> None:
        """Find out anew whether the next action of a queue can start, and when."""
        choices.pop(number, None)
        if next_index[number] == len(queues[number]):
            return
        action = queues[number][next_index[number]]
        awaited = [Action(kind, action.stage, action.micro_batch) for kind in needs[action.kind]]
        awaited += [source] if (source := action.source(num_stages, split)) else []
        for sources in further_sources:
            awaited += sources(action, num_stages)
        if missing := [need for need in awaited if need not in finished_at]:
            watching.setdefault(missing[0], []).append(number)
            return
        place = placement.place_of(_worker_of(action, placement), action.stage)
        start = max(free_at.get(place, 0), *(finished_at[need] for need in awaited), 0)
        fills, rank = False, way(action, num_stages) * (1 if has_turns else -1)
        if action.kind.fills_idle:
            gradient = gradient_action(action.stage, action.micro_batch, split).source(num_stages, split)
            if gradient is not None and gradient not in finished_at:
                watching.setdefault(gradient, []).append(number)
            fills = gradient is not None and (gradient not in finished_at or finished_at[gradient] > start)
            rank = -action.stage if fills else rank
        choices[number] = (start, fills, rank, action, number)

    for number in range(len(queues)):
        look_at(number)
    for _ in range(sum(map(len, queues))):
        if not choices:
            waiting = next(queue[index] for queue, index in zip(queues, next_index, strict=True) if index < len(queue))
            raise ScheduleError(
                f"deadlock: {waiting} waits for {waiting.source(num_stages, split)}, and no stage can go on."
            )
        start, _, _, action, number = min(choices.values())
        process = _worker_of(action, placement)
        free_at[placement.place_of(process, action.stage)] = finished_at[action] = start + action.kind.ticks
        next_index[number] += 1
        process_orders[process].append(action)
        # Nothing else has changed for the other queues.
        for other in {*of_process[process], *watching.pop(action, ())}:
            look_at(other)
    return process_orders


def by_worker(order: Sequence[Action], placement: Placement) -> list[list[Action]]:
    """The order of a stage apart for each of its workers that has a micro-batch."""
    queues: dict[int, list[Action]] = {}
    for action in order:
        queues.setdefault(_worker_of(action, placement), []).append(action)
    return list(queues.values())


def _worker_of(action: Action, placement: Placement) -> int:
    return placement.worker_of(action.stage, action.micro_batch)


def way(action: Action, num_stages: int) -> int:
    """How far a micro-batch has come when it is at this action: down the stages, then up again. W is beside its way."""
    if action.kind.turn:
        return num_stages - 1 + action.kind.turn
    if not action.kind.way:
        return -1
    return action.stage if action.kind.way > 0 else 2 * num_stages + 1 - action.stage
