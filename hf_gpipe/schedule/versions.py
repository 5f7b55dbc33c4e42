"""The versions of a stage's weights in an asynchronous table: how long each is kept, and how stale it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_gpipe.schedule.actions import Action, ActionKind
from hf_gpipe.schedule.table import Schedule


class Use(NamedTuple):
    """The version of its stage's weights that an action reads or replaces."""

    version: int
    """The one that F, R, B and I read; of U the one that it replaces."""
    is_last: bool
    """Whether nothing on the stage reads this version after it. A U then overwrites it; otherwise it is stashed."""


def uses(schedule: Schedule, process: int) -> list[Use]:
    """The use of the weights by each action of a worker, in its order."""
    found: list[Use] = []
    read_later: set[tuple[int, int]] = set()
    updates_left = [schedule.num_steps] * schedule.num_stages
    for action in reversed(schedule.actions[process]):
        if action.kind == ActionKind.UPDATE:
            updates_left[action.stage] -= 1
            version = updates_left[action.stage]
        else:
            version = schedule.version_read[action.stage, _micro_batch(action)]
        where = action.stage, version
        found.append(Use(version, where not in read_later))
        if action.kind != ActionKind.UPDATE:
            read_later.add(where)
    return found[::-1]


def num_stashes(schedule: Schedule, stage: int) -> int:
    """The most old versions of its weights that a stage keeps at once, beside the newest one.

    With weight stashing stage s of K keeps K-s-1 of them (arXiv 1806.03377, section 3.3).
    """
    if not schedule.is_asynchronous:
        return 0
    (process,) = schedule.placement.workers[stage]
    stashed: set[int] = set()
    most = 0
    for action, use in zip(schedule.actions[process], uses(schedule, process), strict=True):
        if action.stage != stage:
            continue
        if action.kind == ActionKind.UPDATE and not use.is_last:
            stashed.add(use.version)
        elif action.kind != ActionKind.UPDATE and use.is_last:
            stashed.discard(use.version)
        most = max(most, len(stashed))
    return most


def staleness(schedule: Schedule, stage: int) -> Sequence[int]:
    """Of each micro-batch, how many updates its gradient is late on a stage.

    It is the number of updates between the version of the weights that the gradient was computed with and the one that
    it changes: 0 in a synchronous table.
    """
    return [step - schedule.version_read[stage, m] for m, step in enumerate(schedule.step_of)]


def _micro_batch(action: Action) -> int:
    assert action.micro_batch is not None, f"{action} has no micro-batch"
    return action.micro_batch
