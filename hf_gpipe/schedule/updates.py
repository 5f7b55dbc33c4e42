"""Puts reductions and updates into each row.

U stands at the end, because clipping and the decision to skip an update need the gradients of all stages. Where nothing
needs them, a mode may update stages beside backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import REDUCE, UPDATE
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.validate import check_table


def with_updates(orders: Sequence[Sequence[Action]], placement: Placement) -> list[list[Action]]:
    """The order of each worker with a U of each of its stages at the end, where every gradient is complete, and a G of
    those that have replicas.

    G stands directly after the worker's last B or W of the stage, so that it overlaps with what the worker still runs;
    at the end if there is none, and where stages are shared, for others have B of the stage too. A G never stands
    before that of a deeper stage, so all workers have one order of them.
    """
    results: list[list[Action]] = []
    for worker, order in enumerate(orders):
        own = placement.stages_of(worker)
        last = {action.stage: index for index, action in enumerate(order) if action.kind.completes_micro_batch}
        waiting = [stage for stage in own if placement.replicas[stage] > 1]
        result: list[Action] = []
        for index, action in enumerate(order):
            result.append(action)
            while waiting and not placement.is_shared and last.get(waiting[-1], len(order)) <= index:
                result.append(Action(REDUCE, waiting.pop()))
        result += [Action(REDUCE, stage) for stage in reversed(waiting)]
        results.append(result + [Action(UPDATE, stage) for stage in own])
    return results


def updates_beside(schedule: Schedule) -> Schedule | None:
    """The table with updates beside its backwards, as a mode has them; None: its updates stay at the end of a step."""
    tables = (make(schedule) for make in functions_of_modes("table", "with_updates_beside"))
    return next((table for table in tables if table is not None), None)


@lru_cache(maxsize=64)
def with_updates_last(schedule: Schedule) -> Schedule:
    """Put a U of each stage at the end of a table whose updates are beside backwards."""
    others = {kind for kind in schedule.kinds if kind.part_of == UPDATE}
    if not others:
        return schedule
    orders = [[action for action in row if action.kind not in others] for row in schedule.actions]
    table = replace(schedule, actions=tuple(map(tuple, with_updates(orders, schedule.placement))))
    check_table(table)
    return table
