"""The visits of weights in the row of a worker, each from its L to its D. `hf_gpipe.schedule.visits` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import DROP, LOAD
from hf_gpipe.schedule.placement import Placement


@dataclass(frozen=True)
class Visit:
    """A visit of a stage's weights in the row of a worker.

    Attributes:
        load, drop: its first and last action; no D where it is missing in a table that was not checked.
        actions: those of micro-batches on the stage between the two.
        after: the last D on the device before its L: from then on there is room for it.
    """

    load: Action
    drop: Action | None
    actions: tuple[Action, ...]
    after: Action | None


def visits_of(row: Sequence[Action], placement: Placement, worker: int) -> list[Visit]:
    """The visits in the row of a worker, in the order of their L."""
    visits: list[tuple[Action, list[Action], Action | None]] = []
    drops: dict[int, Action] = {}
    open_visits: dict[int, int] = {}
    dropped: dict[str | None, Action] = {}
    for action in row:
        device = placement.device_of(action.stage, worker)
        if action.kind == LOAD:
            open_visits[action.stage] = len(visits)
            visits.append((action, [], dropped.get(device)))
        elif (number := open_visits.get(action.stage)) is None:
            continue
        elif action.kind == DROP:
            drops[number] = dropped[device] = action
            del open_visits[action.stage]
        elif action.micro_batch is not None:
            visits[number][1].append(action)
    return [Visit(load, drops.get(n), tuple(actions), after) for n, (load, actions, after) in enumerate(visits)]
