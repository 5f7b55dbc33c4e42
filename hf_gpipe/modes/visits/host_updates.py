"""The action H: updates of shared stages on the host, beside backwards.

    H  does what U does for a shared stage, beside the worker's other actions: weights and gradients of the stage are on
       the host, and H begins when the last D of the stage, and of the stages after it, has left the gradients there. So
       H needs no norm of the whole gradient. A table has U or H

Where nothing needs the gradients of all stages, H updates a stage as soon as its own gradients are complete (RoundPipe,
arXiv 2604.27085, updates so too). No weight is read after its update: a D is the last action that reads the weights of
its visit, and a stage's last D comes after the backwards of all its micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from hf_gpipe.modes.visits.visit import last_drops
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, UPDATE, WEIGHT, ActionKind, Resource, add_kind
from hf_gpipe.schedule.messages import clock_order
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.validate import check_table


def _gradients(schedule: Schedule) -> Mapping[Action, tuple[Action, ...]]:
    """An update on the host waits for the last D of its stage, and of the stages after it that no update before it in
    its row waits for: a tied weight belongs to the lowest stage that uses it."""
    sources: dict[Action, tuple[Action, ...]] = {}
    for row in schedule.actions:
        missing = dict(last_drops(schedule))
        for action in row:
            if action.kind == HOST_UPDATE:
                sources[action] = tuple(missing.pop(stage) for stage in sorted(missing) if stage >= action.stage)
    return sources


HOST_UPDATE = add_kind(
    ActionKind(
        "H",
        "update on the host",
        (("update_seconds", 1),),
        "update",
        "#b48fc0",
        resource=Resource.HOST,
        needs=(BACKWARD, WEIGHT),
        is_of_mini_batch=True,
        rule=UPDATE.rule,
        part_of=UPDATE,
        links=_gradients,
        reads_weights=False,
        changes_weights=True,
    )
)


@lru_cache(maxsize=64)
def with_updates_beside(schedule: Schedule) -> Schedule | None:
    """Put an H of each stage in place of its U; None where stages are not shared, or have replicas, whose gradients are
    summed at the end.

    H stands where the gradients are complete on a clock with equal stages, before the worker's next action. A worker's
    last H is the last action of its row, where it waits for the updates before it.
    """
    if HOST_UPDATE in schedule.kinds:
        return schedule
    if not schedule.placement.is_shared or not schedule.is_training or schedule.placement.has_replicas:
        return None
    placement = schedule.placement
    without = replace(
        schedule, actions=tuple(tuple(action for action in row if action.kind != UPDATE) for row in schedule.actions)
    )
    last = last_drops(without)
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
