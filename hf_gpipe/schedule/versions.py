"""The versions of a stage's weights in a window: how long each is kept, and how stale it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_gpipe.schedule.table import Schedule


class Use(NamedTuple):
    """The version of its stage's weights that an action reads or replaces."""

    version: int
    """The one that F, R, B and I read; of U the one that it replaces."""
    is_last: bool
    """Whether nothing on the worker reads this version of the stage after it. A U then overwrites it; otherwise it is
    stashed."""


def uses(schedule: Schedule, process: int) -> list[Use | None]:
    """The use of the weights by each action of a worker, in its order; a reduction (G) has none.

    Without stashes every action reads the newest version, and an update overwrites it.
    """
    reversed_uses: list[Use | None] = []
    read_later: set[tuple[int, int]] = set()
    newest = [schedule.num_steps] * schedule.num_stages
    for action in reversed(schedule.actions[process]):
        if not action.kind.reads_weights and not action.kind.changes_weights:
            reversed_uses.append(None)
            continue
        newest[action.stage] -= action.kind.changes_weights
        version = newest[action.stage]
        if schedule.stashes and action.micro_batch is not None:
            version = schedule.version_read[action.stage, action.micro_batch]
        where = action.stage, version
        reversed_uses.append(Use(version, not schedule.stashes or where not in read_later))
        if action.kind.reads_weights:
            read_later.add(where)
    return reversed_uses[::-1]


def num_stashes(schedule: Schedule, stage: int, process: int | None = None) -> int:
    """The most old versions of its weights that a stage keeps at once on a worker, beside the newest one; without a
    worker (`process`), on that of the stage's workers that keeps most.

    With weight stashing stage s of K keeps K-s-1 of them (arXiv 1806.03377, section 3.3).
    """
    if not schedule.is_window:
        return 0
    if process is None:
        return max(num_stashes(schedule, stage, worker) for worker in schedule.placement.workers[stage])
    stashed: set[int] = set()
    most = 0
    for action, use in zip(schedule.actions[process], uses(schedule, process), strict=True):
        if action.stage != stage or use is None:
            continue
        if action.kind.changes_weights and not use.is_last:
            stashed.add(use.version)
        elif action.kind.reads_weights and use.is_last:
            stashed.discard(use.version)
        most = max(most, len(stashed))
    return most


def staleness(schedule: Schedule, stage: int) -> Sequence[int]:
    """The number of updates by which the gradient of each micro-batch is late on a stage.

    It is the number of updates between the version of the weights that its forward has read and the one that it
    changes: 0 in a synchronous table.
    """
    return [step - schedule.version_read[stage, m] for m, step in enumerate(schedule.step_of)]
