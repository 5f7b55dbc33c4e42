"""The order of the round-robin pipeline, in which no stage belongs to a worker (RoundPipe, arXiv 2604.27085).

Weights are in CPU memory that all workers share. The work of a few micro-batches is cut into slots of about equal time.
First come slots with the forwards of a group of stages, then a slot with the forwards and the backwards of the last
group, then slots with the backwards of a group of stages. These slots are a round. They are dealt to the workers in
turn, and the slots of the next round, with the next micro-batches, follow them. So the forward and the backward of a
stage may be on any two workers, and a heavy head fills one slot and does not bind one worker.

A slot of backwards takes about three times as long as a slot of forwards of the same stages, because it recomputes. So
groups of forwards have more stages. Within a slot a worker takes one micro-batch after another, and the next slot
begins on the next worker as soon as the first micro-batch is there. The weights of a worker's next slot are loaded
while the worker runs the slot before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, RECOMPUTE
from hf_gpipe.schedule.named import SCHEDULES, NamedSchedule
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.updates import with_updates

Seconds: TypeAlias = float | Fraction


@dataclass(frozen=True)
class Slot:
    """The work of one worker on some micro-batches.

    Attributes:
        stages: consecutive ones.
        has_forwards, has_backwards: of these stages; with both, a forward keeps its graph.
    """

    stages: range
    has_forwards: bool
    has_backwards: bool

    def actions(self, micro_batches: Sequence[int]) -> Iterator[Action]:
        """The actions of a micro-batch on all stages, then those of the next one."""
        for m in micro_batches:
            if self.has_forwards:
                yield from (Action(FORWARD, stage, m) for stage in self.stages)
            for stage in reversed(self.stages) if self.has_backwards else ():
                if not self.has_forwards:
                    yield Action(RECOMPUTE, stage, m)
                yield Action(BACKWARD, stage, m)


@dataclass(frozen=True)
class Deal:
    """The slots of a round, and the number of rounds."""

    slots: tuple[Slot, ...]
    num_rounds: int

    @property
    def together(self) -> range:
        """The stages whose forwards and backwards are in one slot."""
        return next(slot.stages for slot in self.slots if slot.has_forwards and slot.has_backwards)


def deal_of(
    placement: Placement,
    count: int,
    forward: Sequence[Seconds],
    recompute: Sequence[Seconds],
    backward: Sequence[Seconds],
    most_stages: int | None = None,
    num_rounds: int | None = None,
) -> Deal:
    """The smallest slots of about equal time, and the number of rounds with which a step is shortest.

    No slot is longer than that of one stage must be, so groups are as small as they can be: a device holds the weights
    of two. With rounds of m micro-batches and slots of at most t seconds for each of them, a step takes about (slots of
    a worker * m + workers - 1) * t. More rounds deal the slots more evenly, and load weights more often; of equally
    good numbers the least is taken.

    Args:
        placement: whose stages are shared.
        count: number of micro-batches, of all replicas of the pipeline.
        forward, recompute, backward: seconds of a micro-batch on each stage.
        most_stages: of a slot, for a device holds the weights of two; None: as many as take equal time.
        num_rounds: None: that of the shortest step, where copies and updates take no time.

    Raises:
        ScheduleError: the placement does not deal its stages.
    """
    if not placement.is_shared:
        raise ScheduleError(
            f"schedule 'round_robin' and the placement {placement} do not go together: its stages have workers of "
            "their own, and these are dealt; leave the placement out."
        )
    workers, count = len(placement.pipeline_of(0)), -(-count // len(placement.pipelines))
    repeated = [r + b for r, b in zip(recompute, backward, strict=True)]
    together = [f + b for f, b in zip(forward, backward, strict=True)]
    slots = _slots(forward, repeated, together, max(together[-1], *forward[:-1], *repeated[:-1], 0), most_stages)

    def length(rounds: int) -> int:
        return -(-rounds * len(slots) // workers) * -(-count // rounds)

    return Deal(slots, num_rounds or min(range(1, max(1, count // workers) + 1), key=length))


def _slots(
    forward: Sequence[Seconds],
    repeated: Sequence[Seconds],
    together: Sequence[Seconds],
    limit: Seconds,
    most: int | None,
) -> tuple[Slot, ...]:
    """Slots of at most so many seconds for a micro-batch and of at most so many stages, and as few as that allows."""
    first = len(forward) - 1
    seconds = together[first]
    while first and seconds + together[first - 1] <= limit and len(forward) - first != most:
        first -= 1
        seconds += together[first]
    slots = [Slot(group, True, False) for group in _groups(forward[:first], limit, most)]
    slots.append(Slot(range(first, len(forward)), True, True))
    # From the last stage on, in the order in which gradients come.
    for group in _groups(list(reversed(repeated[:first])), limit, most):
        slots.append(Slot(range(first - group.stop, first - group.start), False, True))
    return tuple(slots)


def _groups(seconds: Sequence[Seconds], limit: Seconds, most: int | None) -> list[range]:
    groups: list[range] = []
    start = 0
    for number in range(len(seconds)):
        if number - start == most or (sum(seconds[start : number + 1]) > limit and number > start):
            groups.append(range(start, number))
            start = number
    return [*groups, range(start, len(seconds))] if seconds else []


def round_robin(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Slots of forwards and backwards that are dealt to the processes in turn, whatever their stages, whose weights
    visit (RoundPipe, arXiv 2604.27085): see this module.

    Here all stages are equal, so three of them have their forwards in one slot. With S slots in a round and P processes
    the bubble is about (P-1) / (S M / P + P-1), if the slots of all rounds are a multiple of P.

    K = 4, M = 2, on two processes, with L and D left out:

        process 0  0F0 1F0 2F0 0F1 1F1 2F1 2R0 2B0 --- 2R1 2B1 --- ... 0R0 0B0 --- 0R1 0B1 ---
        process 1  ... ... ... 3F0 3B0 --- 3F1 3B1 --- ... 1R0 1B0 --- 1R1 1B1 --- ... ... ...
    """
    forward, recompute, backward = ([kind.ticks] * placement.num_stages for kind in (FORWARD, RECOMPUTE, BACKWARD))
    deal = deal_of(placement, num_micro_batches, forward, recompute, backward)
    if None in limits[: deal.together.start]:
        raise ScheduleError(
            "schedule 'round_robin' recomputes, for the backward of a stage is on another worker than its forward; let "
            "recompute be stage."
        )
    return round_robin_orders(placement, num_micro_batches, deal)


ROUND_ROBIN = "round_robin"
SCHEDULES[ROUND_ROBIN] = NamedSchedule(
    round_robin,
    place=Placement.shared,
    is_shared=True,
    takes_groups=False,
    text="the stages, whose weights visit, are dealt to the processes of a machine",
    same_replicas="is dealt to one pipeline's workers",
)


def dealt_table(placement: Placement, count: int, deal: Deal, name: str = "round_robin") -> Schedule:
    """The table of slots that are made for stages of unequal cost; `check_table` has not seen it."""
    orders = round_robin_orders(placement, count, deal)
    return Schedule(name, placement.num_stages, count, placement, tuple(map(tuple, with_updates(orders, placement))))


def round_robin_orders(placement: Placement, num_micro_batches: int, deal: Deal) -> list[list[Action]]:
    """The actions of each worker of a placement that deals its stages, with L and D."""
    orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    num_visits: dict[int, int] = {}
    for replica, pipeline in enumerate(placement.pipelines):
        own = range(replica, num_micro_batches, len(placement.pipelines))
        for worker, order in zip(pipeline, _of_pipeline(len(pipeline), own, deal, num_visits), strict=True):
            orders[worker] = order
    return orders


def _of_pipeline(size: int, micro_batches: Sequence[int], deal: Deal, num_visits: dict[int, int]) -> list[list[Action]]:
    """The actions of each worker of a pipeline; the visits of each stage follow those that are counted."""
    rounds = min(deal.num_rounds, max(1, len(micro_batches)))
    base, extra = divmod(len(micro_batches), rounds)
    dealt: list[list[tuple[Slot, Sequence[int], dict[int, int]]]] = [[] for _ in range(size)]
    number, start = 0, 0
    for index in range(rounds):
        stop = start + base + (index < extra)
        for slot in deal.slots if stop > start else ():
            before = dealt[number % size][-1:]
            # A stage of the slot before is still there.
            visits = {s: before[0][2][s] for s in slot.stages if before and s in before[0][2]}
            for stage in slot.stages:
                if stage not in visits:
                    visits[stage] = num_visits.get(stage, 0)
                    num_visits[stage] = visits[stage] + 1
            dealt[number % size].append((slot, micro_batches[start:stop], visits))
            number += 1
        start = stop
    return [_with_visits(slots) for slots in dealt]


def _with_visits(slots: Sequence[tuple[Slot, Sequence[int], dict[int, int]]]) -> list[Action]:
    """The actions of a worker's slots: the next slot's weights are loaded before those of the first micro-batch of a
    slot, and its own are dropped after its last."""
    order: list[Action] = []
    loaded: set[tuple[int, int]] = set()

    def load(visits: dict[int, int]) -> None:
        for visit in visits.items():
            if visit not in loaded:
                loaded.add(visit)
                order.append(_of_visit(Action(LOAD, visit[0]), visit[1]))

    for number, (slot, micro_batches, visits) in enumerate(slots):
        load(visits)
        following = slots[number + 1][2] if number + 1 < len(slots) else {}
        # One that is there in another visit must go first.
        load({stage: visit for stage, visit in following.items() if stage not in visits})
        order += slot.actions(micro_batches)
        order += [_of_visit(Action(DROP, s), v) for s, v in visits.items() if following.get(s) != v]
    return order


def _of_visit(action: Action, visit: int) -> Action:
    return replace(action, step=visit)
