"""The actions L and D, and the visits of weights that they begin and end.

L  loads the stage's weights from the host to the device, for a visit: a run of the stage's actions, up to D
D  drops them again, where they have not changed, and copies the gradients that the visit has made to the host. A
   stage has L and D only where its weights visit
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECOMPUTE,
    WEIGHT,
    ActionKind,
    Resource,
    add_kind,
)
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule


@dataclass(frozen=True)
class Visit:
    """A visit of a stage's weights in the row of a worker.

    Attributes:
        load, drop: its first and last action; no D where it is missing in a table that was not checked.
        actions: those of micro-batches on the stage between the two.
        after: the D of the visit whose buffer it takes; None: no visit in the row had the buffer before.
    """

    load: Action
    drop: Action | None
    actions: tuple[Action, ...]
    after: Action | None

    @property
    def makes_gradients(self) -> bool:
        """Whether gradients of the weights are made in it."""
        return any(action.kind.completes_micro_batch for action in self.actions)


def visits(schedule: Schedule, worker: int) -> tuple[Visit, ...]:
    """The visits of weights in the row of a worker."""
    # By identity: a visit's hash is that of all its actions.
    return tuple({id(visit): visit for visit in _visit_of(schedule)[worker].values()}.values())


def visit_of(schedule: Schedule, worker: int, action: Action) -> Visit | None:
    """The visit that an action of a worker is in, or that it begins or ends."""
    return _visit_of(schedule)[worker].get(action)


@lru_cache(maxsize=64)
def _visit_of(schedule: Schedule) -> tuple[Mapping[Action, Visit], ...]:
    """The visit of each action that has one, for each worker."""
    every = []
    for worker, row in enumerate(schedule.actions):
        found = _visits_of(row, schedule.placement, worker) if schedule.kinds & {LOAD, DROP} else []
        every.append({action: v for v in found for action in (v.load, *v.actions, v.drop) if action is not None})
    return tuple(every)


def _visits_of(row: Sequence[Action], placement: Placement, worker: int) -> list[Visit]:
    """The visits in the row of a worker, in the order of their L.

    A device has as many buffers as it has visits at once at most. An L takes the buffer that has been free for longest.
    """
    visits: list[tuple[Action, list[Action], str | None]] = []
    ends: dict[int, Action] = {}
    open_visits: dict[int, int] = {}
    drops: defaultdict[str | None, list[Action]] = defaultdict(list)
    there, num_buffers = Counter[str | None](), Counter[str | None]()
    for action in row:
        device = placement.device_of(action.stage, worker)
        if action.kind == LOAD:
            open_visits[action.stage] = len(visits)
            visits.append((action, [], device))
            there[device] += 1
            num_buffers[device] = max(num_buffers[device], there[device])
        elif (number := open_visits.get(action.stage)) is None:
            continue
        elif action.kind == DROP:
            ends[number] = action
            drops[device].append(action)
            there[device] -= 1
            del open_visits[action.stage]
        elif action.micro_batch is not None:
            visits[number][1].append(action)
    made, earlier = [], Counter[str | None]()
    for number, (load, actions, device) in enumerate(visits):
        buffer = earlier[device] - num_buffers[device]
        earlier[device] += 1
        after = drops[device][buffer] if buffer >= 0 else None
        made.append(Visit(load, ends.get(number), tuple(actions), after))
    return made


def _concerned(schedule: Schedule, worker: int, action: Action, kind: ActionKind) -> Iterator[Action]:
    """Yield the actions of a kind in the visit of an action; of an L the D that makes room for it."""
    visit = visit_of(schedule, worker, action)
    if visit is None:
        return
    if action.kind == LOAD:
        if kind == DROP and visit.after is not None:
            yield visit.after
    elif kind == LOAD:
        yield visit.load
    elif kind == DROP and visit.drop is not None:
        yield visit.drop
    else:
        yield from (candidate for candidate in visit.actions if candidate.kind == kind)


def _makes_no_gradients(schedule: Schedule, worker: int, action: Action) -> bool:
    visit = visit_of(schedule, worker, action)
    return visit is not None and not visit.makes_gradients


@lru_cache(maxsize=64)
def _backward_visits(
    schedule: Schedule,
) -> Mapping[tuple[int, tuple[int, ...]], list[tuple[int, int, Action, Action | None]]]:
    """The visits with backwards of each shared stage in each pipeline, in order: (first micro-batch, worker, first
    backward, D)."""
    found: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, Action, Action | None]]] = {}
    for worker in range(len(schedule.actions)):
        pipeline = schedule.placement.pipeline_of(worker)
        for visit in visits(schedule, worker):
            if backwards := [action for action in visit.actions if action.kind.completes_micro_batch]:
                first = min(backward.micro_batch or 0 for backward in backwards)
                own = found.setdefault((visit.load.stage, pipeline), [])
                own.append((first, worker, backwards[0], visit.drop))
    for own in found.values():
        own.sort(key=lambda entry: entry[:2])
    return found


def last_drops(schedule: Schedule) -> Mapping[int, Action]:
    """The D after which the gradients of a shared stage without replicas are complete, where there is one."""
    return {stage: own[-1][3] for (stage, _), own in _backward_visits(schedule).items() if own[-1][3]}


def _signals(schedule: Schedule) -> Mapping[Action, tuple[Action, ...]]:
    """The first backward of a visit of a shared stage waits for the D of the visit before, which leaves the gradients
    of the stage's weights."""
    if not schedule.placement.is_shared:
        return {}
    return {
        backward: (drop,)
        for own in _backward_visits(schedule).values()
        for (_, before, _, drop), (_, worker, backward, _) in pairwise(own)
        if before != worker and drop is not None
    }


DROP = add_kind(
    ActionKind(
        "D",
        "drop",
        colour="#b0a48f",
        resource=Resource.COPY_OUT,
        needs=(FORWARD, RECOMPUTE, BACKWARD, INPUT, WEIGHT),
        way=0,
        is_of_mini_batch=True,
        is_numbered=True,
        concerned=_concerned,
        links=_signals,
        is_signal=True,
        carries_gradients=True,
        does_nothing=_makes_no_gradients,
        is_paced=True,
        copies="weights",
        in_training_only=False,
        reads_weights=False,
    )
)
LOAD = add_kind(
    ActionKind(
        "L",
        "load",
        colour="#d9cbb2",
        resource=Resource.COPY_IN,
        needs=(DROP,),
        needed_by=(FORWARD, RECOMPUTE, BACKWARD, INPUT, WEIGHT),
        way=0,
        is_of_mini_batch=True,
        is_numbered=True,
        concerned=_concerned,
        copies="weights",
        in_training_only=False,
        reads_weights=False,
    )
)
