"""Puts reductions and updates into each row; the updates of dealt stages also on the host, beside backwards.

U stands at the end, because clipping and the decision to skip an update need the gradients of all stages. Where nothing
needs the gradients of all stages, H updates a stage as soon as its own gradients are complete (RoundPipe, arXiv
2604.27085, updates so too). No weight is read after its update: a D is the last action that reads the weights of its
visit, and a stage's last D comes after the backwards of all its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import HOST_UPDATE, REDUCE, UPDATE
from hf_gpipe.schedule.messages import clock_order
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.validate import check_table


def with_updates(orders: Sequence[Sequence[Action]], placement: Placement) -> list[list[Action]]:
    """The order of each worker with a U of each of its stages at the end, where every gradient is complete, and a G of
    those that have replicas.

    G stands directly after the worker's last B or W of the stage, so that it overlaps with what the worker still runs;
    at the end if there is none, and where stages are dealt, for others have B of the stage too. A G never stands before
    that of a deeper stage, so all workers have one order of them.
    """
    results: list[list[Action]] = []
    for worker, order in enumerate(orders):
        own = placement.stages_of(worker)
        last = {action.stage: index for index, action in enumerate(order) if action.kind.completes_micro_batch}
        waiting = [stage for stage in own if placement.replicas[stage] > 1]
        result: list[Action] = []
        for index, action in enumerate(order):
            result.append(action)
            while waiting and not placement.is_dealt and last.get(waiting[-1], len(order)) <= index:
                result.append(Action(REDUCE, waiting.pop()))
        result += [Action(REDUCE, stage) for stage in reversed(waiting)]
        results.append(result + [Action(UPDATE, stage) for stage in own])
    return results


def can_update_beside(schedule: Schedule) -> bool:
    """Whether the stages of a table can be updated beside backwards: they are dealt, and have no replicas, whose
    gradients are summed at the end."""
    return schedule.placement.is_dealt and schedule.is_training and not schedule.placement.has_replicas


@lru_cache(maxsize=64)
def with_updates_beside(schedule: Schedule) -> Schedule:
    """Put an H of each stage in place of its U.

    H stands where the gradients are complete on a clock with equal stages, before the worker's next action. A worker's
    last H is the last action of its row, where it waits for the updates before it.

    Raises:
        ScheduleError: `can_update_beside` is false.
    """
    if HOST_UPDATE in schedule.kinds:
        return schedule
    if not can_update_beside(schedule):
        raise ScheduleError(
            f"schedule {schedule.name!r}: its updates stay at the end of a step; those of dealt stages without "
            "replicas can be beside backwards."
        )
    placement = schedule.placement
    without = replace(
        schedule, actions=tuple(tuple(action for action in row if action.kind != UPDATE) for row in schedule.actions)
    )
    last = without.last_drops
    waiting = [sorted(placement.stages_of(worker), reverse=True) for worker in range(len(schedule.actions))]
    rows: list[list[Action]] = [[] for _ in waiting]
    missing = {*last.values()}
    for worker, action in clock_order(without):
        # Not the last one of a worker.
        while len(own := waiting[worker]) > 1 and not any(last[s] in missing for s in last if s >= own[0]):
            rows[worker].append(Action(HOST_UPDATE, own.pop(0)))
        rows[worker].append(action)
        missing.discard(action)
    for row, own in zip(rows, waiting, strict=True):
        row += [Action(HOST_UPDATE, stage) for stage in own]
    table = replace(schedule, actions=tuple(map(tuple, rows)))
    check_table(table)
    return table


@lru_cache(maxsize=64)
def with_updates_last(schedule: Schedule) -> Schedule:
    """Put a U of each stage at the end of a table in place of its H."""
    if HOST_UPDATE not in schedule.kinds:
        return schedule
    orders = [[action for action in row if action.kind != HOST_UPDATE] for row in schedule.actions]
    table = replace(schedule, actions=tuple(map(tuple, with_updates(orders, schedule.placement))))
    check_table(table)
    return table
