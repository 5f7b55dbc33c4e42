"""The actions O and P, between which the tensors that a graph saves are on the host.

    O  offloads what the graph of F saves to the host, beside the actions that follow
    P  prefetches it again, for B or I, which waits for P

O stands directly after F. P stands before the backward that precedes the graph's own backward, and the graph comes back
beside that backward (PipeOffload, arXiv 2503.01328). So a device has the graph that its backward uses up, the graph
that is needed next, and a graph that leaves while a forward makes another. A graph stays where it would hardly have
left before it comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, ActionKind, Fault, Held, Resource, add_kind
from hf_gpipe.schedule.table import Schedule

#: The value of `recompute` of a stage whose graphs wait on the host.
HOST = "host"
#: The saved activations in CPU memory, from the beginning of O to the end of P: a thing that a stage holds.
AWAY = "graph on the host"
#: A device that never has more graphs keeps them: it would have as many while some leave and come.
FEWEST_GRAPHS = 3
#: So many actions compute at least between O and P.
_AWAY_FOR = 2


def faults(schedule: Schedule) -> Iterator[Fault]:
    """A graph that goes to the host comes back before its backward, and is not made again."""
    for process, row in enumerate(schedule.actions if {OFFLOAD, PREFETCH} & schedule.kinds else ()):
        held: dict[tuple[int, int | None], str | None] = {}
        for action in row:
            where, kind = (action.stage, action.micro_batch), action.kind
            freed = next((item for item in kind.frees if item in (Held.GRAPH, AWAY)), None)
            is_made_again = kind.makes is Held.GRAPH and freed is None and held.get(where) == AWAY
            if is_made_again or (freed is not None and held.get(where) != freed):
                yield (
                    f"{action} on process {process}: a graph goes to the host by {OFFLOAD}, after its F, and comes "
                    f"back by {PREFETCH} before its backward; write one of each, and no R.",
                    process,
                )
            if kind.makes in (Held.GRAPH, AWAY) or freed is not None:
                held[where] = kind.makes
    if OFFLOAD in schedule.kinds and any(kind.copies == "weights" for kind in schedule.kinds):
        yield "graphs that go to the host keep weights, which then cannot visit; leave O and P out.", 0


OFFLOAD = add_kind(
    ActionKind(
        "O",
        "offload",
        colour="#c4a6c9",
        resource=Resource.COPY_OUT,
        needs=(FORWARD,),
        way=0,
        is_paced=True,
        makes=AWAY,
        frees=(Held.GRAPH,),
        working=AWAY,
        held_ticks=1,
        copies="graphs",
        recompute=HOST,
        reads_weights=False,
    )
)
PREFETCH = add_kind(
    ActionKind(
        "P",
        "prefetch",
        colour="#e3cfe6",
        resource=Resource.COPY_IN,
        needs=(FORWARD, OFFLOAD),
        needed_by=(BACKWARD, INPUT),
        way=0,
        makes=Held.GRAPH,
        frees=(AWAY,),
        working=Held.GRAPH,
        held_ticks=1,
        copies="graphs",
        recompute=HOST,
        reads_weights=False,
    )
)


def apply(table: Schedule, recompute: Sequence[str | int]) -> Schedule:
    """The table, in which graphs of the stages whose entry is "host" go to the host."""
    return with_offloads(table, frozenset(stage for stage, entry in enumerate(recompute) if entry == HOST))


def is_away(schedule: Schedule, action: Action) -> bool:
    """Whether the graph of the stage and micro-batch of an action goes to the host."""
    return OFFLOAD in schedule.kinds and schedule.has(Action(OFFLOAD, action.stage, action.micro_batch))


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
