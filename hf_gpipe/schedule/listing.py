"""One run of the clock of list scheduling, by given rules; `list_scheduling` looks for the rules.

A forward waits if it would leave no room for the oldest micro-batch of the deeper stages of its device, or of its own
stage where that micro-batch has to be recomputed. So the oldest micro-batch can always go on, and every table runs to
its end. Where micro-batches depend on each other in groups, a group's backward needs all its forwards. So a forward
waits too if a group before its own, which has forwards left on the device, would then not find room for all of it once
older groups have gone. Such tables have no R.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, INPUT, RECOMPUTE, WEIGHT
from hf_gpipe.schedule.placement import Placement

_KINDS = (FORWARD, RECOMPUTE, INPUT, WEIGHT)
_F, _R, _I, _W = range(4)


@dataclass(frozen=True)
class Work:
    """The work of one micro-batch: one value for each stage, `transfer_seconds` for each boundary."""

    forward_seconds: Sequence[float]
    input_seconds: Sequence[float]
    """The time of I, and of R too where the stage recomputes every micro-batch."""
    weight_seconds: Sequence[float]
    held: Sequence[float]
    """The part of the limit that a micro-batch takes from the start of its F, or R, to the end of its I."""
    deferred: Sequence[float]
    """The part that it takes from then to the end of its W; at most as much."""
    transfer_seconds: Sequence[float]
    recompute_seconds: Sequence[float] | None = None
    """The time of R. None: the table has no R."""
    received: Sequence[float] | None = None
    """The part that a micro-batch without a graph takes from the start of its F to the start of its R."""

    @classmethod
    def equal_stages(cls, num_stages: int, recomputed: Sequence[bool] | None = None) -> Work:
        """F, R, I and W of one second each, free messages, and 1 of the limit for each stage."""
        ones = [1.0] * num_stages
        input_seconds = [1.0 + again for again in recomputed or [False] * num_stages]
        return cls(ones, input_seconds, ones, ones, ones, [0.0] * (num_stages - 1))


class StageRules(NamedTuple):
    """The actions that a stage prefers, and how far it runs ahead.

    Attributes:
        ranks: of F, R, I and W; the smallest one goes first.
        in_flight: the most micro-batches between F and W.
        graphs: the most that it keeps from F on; R makes the others.
        waits: whether R waits until the gradient is about to come.
    """

    ranks: tuple[int, int, int, int]
    in_flight: float
    graphs: float = math.inf
    waits: bool = False


Rules: TypeAlias = tuple[StageRules, ...]
"""The rules of each stage."""


class _Lane:
    """A stage on one of its workers: what it has done, and what it can do next."""

    def __init__(
        self, stage: int, process: int, own: Sequence[int], backwards: Sequence[int], work: Work, rules: StageRules
    ) -> None:
        self.stage, self.process, self.rules = stage, process, rules
        #: Its micro-batches in the order of F, and in that of I and W.
        self.own, self.backwards = own, backwards
        self.held = work.held[stage]
        self.recomputes = work.recompute_seconds is not None
        self.recompute_seconds = work.recompute_seconds[stage] if work.recompute_seconds else 0.0
        self.received = work.received[stage] if work.received else 0.0
        #: The room that R takes.
        self.again = self.held - self.received
        self.forwards = self.inputs = self.weights = 0
        #: The time at which what F, I and W of a micro-batch need has come, by micro-batch.
        self.arrived: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        self.deferred: dict[int, float] = {}
        #: Micro-batches that keep the graph of their F, and those without one, with the end of their F.
        self.kept: set[int] = set()
        self.dropped: dict[int, float] = {}

    @property
    def needs(self) -> float:
        """The room without which its oldest micro-batch could not go on."""
        if self.forwards < len(self.own):
            return self.held
        return self.again if self.dropped else 0.0

    def next(self, free_at: float, room: float, *, leaves_room: bool) -> _Next | None:
        """Its next action, as far as it is known by now, on a device that is free from then on and has so much room.

        `leaves_room` says whether a forward would leave room for groups.
        """
        own, rules, forwards, inputs = self.own, self.rules, self.forwards, self.inputs
        (rank_f, rank_r, rank_i, rank_w), depth = rules.ranks, -self.stage
        best: _Next | None = None
        needed = 0.0  # by the oldest micro-batch, of the room
        if inputs < forwards:
            oldest = self.backwards[inputs]
            gradient = self.gradients.get(oldest)
            if oldest in self.dropped:
                needed = self.again
                if room >= needed and not (rules.waits and gradient is None):
                    start = self.dropped[oldest]
                    if rules.waits and gradient is not None:
                        start = max(start, gradient - self.recompute_seconds)
                    best = max(start, free_at), rank_r, depth, _R, True
            elif gradient is not None:
                best = max(gradient, free_at), rank_i, depth, _I, True
        if self.weights < inputs:
            weight = max(self.deferred[self.backwards[self.weights]], free_at), rank_w, depth, _W, True
            if best is None or weight < best:
                best = weight
        if forwards == len(own) or own[forwards] not in self.arrived:
            return best
        if forwards - self.weights >= rules.in_flight or not leaves_room:
            return best
        keeps = room - self.held >= needed and len(self.kept) < rules.graphs
        if not keeps and not (
            self.recomputes and room - self.received >= (self.again if inputs == forwards else needed)
        ):
            return best
        forward = max(self.arrived[own[forwards]], free_at), rank_f, depth, _F, keeps
        return forward if best is None or forward < best else best


_Next: TypeAlias = tuple[float, int, int, int, bool]
"""The next action of a lane: its start, rank, minus the stage, the index of the kind, and of F whether it keeps its
graph. The first three decide which of several it is."""


class _Place:
    """A device of a process: its stages from the deepest one up, its room in all and left, and when it is free."""

    def __init__(self, room: float) -> None:
        self.lanes: list[_Lane] = []
        self.size = self.room = room
        self.free_at = 0.0
        #: How many times its next action was chosen: an earlier choice no longer counts.
        self.version = 0


class Run:
    """One run of the clock; `seconds` are those of the table that it makes, without updates."""

    def __init__(
        self, placement: Placement, num_micro_batches: int, work: Work, limits: Sequence[float], rules: Rules
    ) -> None:
        self._work = work
        self._group_size = placement.group_size
        self._seconds = (
            work.forward_seconds,
            work.recompute_seconds or (),
            work.input_seconds,
            work.weight_seconds,
        )
        self._num_processes = placement.num_processes
        #: What ran, as (process, index of the kind, stage, micro-batch).
        self.order: list[tuple[int, int, int, int]] = []
        self.seconds = 0.0
        self._waiting: list[tuple[float, int, int, int, int, _Lane, int, bool]] = []
        self._places: list[_Place] = []
        #: The lanes of each stage, in the order of its workers, with the numbers of their places.
        self._lanes: list[list[tuple[_Lane, int]]] = [[] for _ in range(placement.num_stages)]
        numbers: dict[tuple[int, str | None], int] = {}
        for stage in reversed(range(placement.num_stages)):
            for process in placement.workers[stage]:
                number = numbers.setdefault((process, placement.device_of(stage, process)), len(numbers))
                if number == len(self._places):
                    self._places.append(_Place(limits[process]))
                own = placement.micro_batches_of(stage, process, num_micro_batches)
                lane = _Lane(stage, process, own, placement.backward_order(own), work, rules[stage])
                if stage == 0:
                    lane.arrived = dict.fromkeys(own, 0.0)
                self._places[number].lanes.append(lane)
                self._lanes[stage].append((lane, number))
        for place in self._places:
            needed = self._group_size * sum(lane.held for lane in place.lanes)
            if needed > place.room:
                what = groups.in_words(self._group_size)
                raise ScheduleError(
                    f"process {place.lanes[0].process} may hold {place.room:g}, and {what} in its stages "
                    f"takes {needed:g}; let it hold more."
                )

    def run(self, most_seconds: float = math.inf) -> Run:
        """Run to the end; or no further, with infinite seconds, where it takes longer than so many seconds."""
        waiting, places, seconds_of, seconds = self._waiting, self._places, self._seconds, 0.0
        for number in range(len(places)):
            self._choose(number)
        while waiting:
            start, _, _, number, version, lane, kind, keeps = heappop(waiting)
            if version != places[number].version:
                continue
            end = start + seconds_of[kind][lane.stage]
            if end > most_seconds:
                self.seconds = math.inf
                return self
            if end > seconds:
                seconds = end
            receiver = self._do(number, lane, kind, end, keeps)
            self._choose(number)
            if receiver != number:
                self._choose(receiver)
        self.seconds = seconds
        return self

    @property
    def orders(self) -> list[list[Action]]:
        """The actions that ran (F, R, I and W), by process."""
        orders: list[list[Action]] = [[] for _ in range(self._num_processes)]
        for process, kind, stage, m in self.order:
            orders[process].append(Action(_KINDS[kind], stage, m))
        return orders

    def _choose(self, number: int) -> None:
        """Choose the next action of a place anew."""
        place = self._places[number]
        free_at, room = place.free_at, place.room
        place.version += 1
        best: _Next | None = None
        chosen = place.lanes[0]
        for lane in place.lanes:
            leaves_room = self._group_size == 1 or self._leaves_room_for_groups(place, lane)
            following = lane.next(free_at, room, leaves_room=leaves_room)
            if following is not None and (best is None or following < best):
                best, chosen = following, lane
            if lane is not place.lanes[-1]:
                room -= lane.needs
        if best is not None:
            start, rank, depth, kind, keeps = best
            heappush(self._waiting, (start, rank, depth, number, place.version, chosen, kind, keeps))

    def _leaves_room_for_groups(self, place: _Place, lane: _Lane) -> bool:
        """Whether the oldest group with forwards left on a device finds room for all of it after the lane's next.

        Of the groups before it nothing is left by then. Of later ones, whose backward comes after its own, all is held.
        """
        size = self._group_size
        left = {
            other.stage: other.own[other.forwards] // size for other in place.lanes if other.forwards < len(other.own)
        }
        oldest = min(left.values(), default=0)
        if left.get(lane.stage, oldest) == oldest:
            return True
        taken = lane.held
        for other in place.lanes:
            after = bisect_left(other.own, (oldest + 1) * size)
            if after and other.own[after - 1] // size == oldest:
                taken += size * other.held
            taken += max(other.forwards - after, 0) * other.held
        return taken <= place.size

    def _do(self, number: int, lane: _Lane, kind: int, end: float, keeps: bool) -> int:
        """Run an action; returns the number of the place that receives its message, or of its own."""
        stage, place = lane.stage, self._places[number]
        own, done = (
            (lane.own, lane.forwards) if kind == _F else (lane.backwards, lane.weights if kind == _W else lane.inputs)
        )
        m = own[done]
        self.order.append((lane.process, kind, stage, m))
        place.free_at = end
        if kind == _R:
            place.room -= lane.again
            del lane.dropped[m]
            return number
        if kind == _W:
            lane.weights += 1
            place.room += self._work.deferred[stage]
            return number
        if kind == _F:
            lane.forwards += 1
            place.room -= lane.held if keeps else lane.received
            if keeps:
                lane.kept.add(m)
            else:
                lane.dropped[m] = end
            after = stage + 1
        else:
            lane.inputs += 1
            lane.kept.discard(m)
            lane.deferred[m] = end
            place.room += lane.held - self._work.deferred[stage]
            after = stage - 1
        if after == len(self._lanes):
            lane.gradients[m] = end
            return number
        if after < 0:
            return number
        receiver, its_number = self._lanes[after][m // self._group_size % len(self._lanes[after])]
        arrives = end if its_number == number else end + self._work.transfer_seconds[min(stage, after)]
        (receiver.arrived if kind == _F else receiver.gradients)[m] = arrives
        return its_number
