"""Puts O and P into a table, so that the tensors that a graph saves are on the host between forward and backward.

O stands directly after F. P stands before the backward that precedes the graph's own backward, and the graph comes back
beside that backward (PipeOffload, arXiv 2503.01328). So a device has the graph that its backward uses up, the graph
that is needed next, and a graph that leaves while a forward makes another. A graph stays where it would hardly have
left before it comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, OFFLOAD, PREFETCH, Held, Resource
from hf_gpipe.schedule.table import Schedule

#: A device that never has more graphs keeps them: it would have as many while some leave and come.
FEWEST_GRAPHS = 3
#: So many actions compute at least between O and P.
_AWAY_FOR = 2


@lru_cache(maxsize=64)
def with_offloads(schedule: Schedule, stages: AbstractSet[int]) -> Schedule:
    """Let graphs of some stages go to the host. These stages recompute nothing in the returned table."""
    if not (stages and schedule.is_training):
        return schedule
    rows = tuple(_row(schedule, worker, stages) for worker in range(len(schedule.actions)))
    return replace(schedule, actions=rows)


def _row(schedule: Schedule, worker: int, stages: AbstractSet[int]) -> tuple[Action, ...]:
    """The row of a worker with O and P."""
    row, placement = schedule.actions[worker], schedule.placement
    of_devices: defaultdict[str | None, list[int]] = defaultdict(list)
    for at, action in enumerate(row):
        if action.micro_batch is not None and action.kind.resource is Resource.COMPUTE:
            of_devices[placement.device_of(action.stage, worker)].append(at)
    before, after = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    for own in of_devices.values():
        changes = [schedule.graphs_made(row[at]) for at in own if row[at].stage in stages]
        if max(accumulate(changes), default=0) <= FEWEST_GRAPHS:
            continue
        forwards: dict[tuple[int, int | None], int] = {}
        last_backward = -1
        for place, at in enumerate(own):
            action = row[at]
            where = action.stage, action.micro_batch
            if action.kind == FORWARD:
                forwards[where] = place
            elif Held.GRAPH in action.kind.frees:
                forward = forwards[where]
                comes = last_backward if last_backward > forward else place - 1
                if action.stage in stages and comes - forward > _AWAY_FOR:
                    after[own[forward]].append(Action(OFFLOAD, *where))
                    before[own[comes]].append(Action(PREFETCH, *where))
                last_backward = place
    return tuple(entry for at, action in enumerate(row) for entry in (*before[at], action, *after[at]))
