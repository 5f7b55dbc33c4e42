"""The action A: the update of the step before, on the host, beside the forwards of this step.

A  updates a stage whose trained weights visit from the gradients of the step before, which U has clipped. It stands
   at the head of the row, and the stage's L waits for it. It does nothing where no update waits: in a run's first
   step, and where the weights were read between the two steps
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from hf_gpipe.modes.visits.visit import LOAD
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import ActionKind, Fault, Resource, add_kind
from hf_gpipe.schedule.table import Schedule


def _of_stage(schedule: Schedule, worker: int, action: Action, kind: ActionKind) -> Iterator[Action]:
    """Yield the A that a load waits for."""
    if kind == LATE_UPDATE:
        yield Action(kind, action.stage)


LATE_UPDATE = add_kind(
    ActionKind(
        "A",
        "update of the step before",
        part="update",
        colour="#c3a5d1",
        resource=Resource.HOST,
        needed_by=(LOAD,),
        is_of_mini_batch=True,
        concerned=_of_stage,
        reads_weights=False,
        changes_weights=True,
    )
)


@lru_cache(maxsize=64)
def with_late_updates(schedule: Schedule) -> Schedule:
    """Put an A of each stage that visits at the head of its row, in the order of their first loads.

    Stages that are shared keep U or H alone: the worker that loads a stage is not the worker that updates it.
    """
    if LATE_UPDATE in schedule.kinds or schedule.placement.is_shared or not schedule.is_training:
        return schedule
    rows = []
    for row in schedule.actions:
        stages = dict.fromkeys(action.stage for action in row if action.kind == LOAD)
        rows.append((*(Action(LATE_UPDATE, stage) for stage in stages), *row))
    return replace(schedule, actions=tuple(rows))


def faults_of_late_updates(schedule: Schedule) -> Iterator[Fault]:
    """An A is of a stage that visits and has one owner; that it comes before the stage's L is checked with L."""
    for process, row in enumerate(schedule.actions if LATE_UPDATE in schedule.kinds else ()):
        visiting = {action.stage for action in row if action.kind == LOAD}
        for action in row:
            if action.kind == LATE_UPDATE and (action.stage not in visiting or schedule.placement.is_shared):
                problem = "A updates a stage that this process alone loads (L) and updates (U)"
                yield f"{action} on process {process}: {problem}; leave it out.", process
