"""Tables with a split backward, by list scheduling: whenever a device is free, of the actions that can start the one
that comes first in an order of priority goes next, under a limit of what the device may hold.

The gradient of the inputs (I) is on the way of a micro-batch and the gradient of the weights (W) is not: only the
update waits for it. So W fills the time in which a device has nothing else to do, or no room for another forward (zero
bubble, arXiv 2401.10241, section 2). How far forwards may run ahead, and with it how much of the bubble can be filled,
is a question of memory alone (controllable memory, arXiv 2405.15362, section 3): a (stage, micro-batch) takes room from
the start of its F to the end of its W.

Which order of priority is best depends on the numbers of stages and micro-batches and on their seconds, so all of
`PRIORITIES` are tried. A forward waits if it would leave no room for one micro-batch in the deeper stages of its
device: then the oldest micro-batch can always go on, and every table runs to its end. Where rows are cut into chunks,
each a micro-batch, a row's backward needs the forwards of all its chunks. So a forward waits too if a row before its
own, which has forwards left on the device, would then not find room for all its chunks once older rows have gone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, INPUT, WEIGHT, ActionKind
from hf_gpipe.schedule.placement import Placement

F, I, W = FORWARD, INPUT, WEIGHT  # noqa: E741
_KINDS = (F, I, W)
Rule: TypeAlias = tuple[ActionKind, bool]
"""F or I, and whether of a stage in the second half."""

_F1, _F0, _I1, _I0 = (F, True), (F, False), (I, True), (I, False)
PRIORITIES: tuple[tuple[Rule, ...], ...] = (
    (_I1, _F1, _F0, _I0),
    (_F1, _I0, _F0, _I1),
    (_F1, _F0, _I1, _I0),
    (_F1, _I1, _F0, _I0),
    (_I0, _F1, _I1, _F0),
)
"""Orders of priority of F and I; W comes last in each. Forwards of the second half of the stages come before those of
the first, for they free room earlier. Over many numbers of stages and micro-batches, one of these five was as short as
the best of all orders with this property."""


@dataclass(frozen=True)
class Work:
    """The work of one micro-batch: one value for each stage, the last one for each boundary."""

    forward_seconds: Sequence[float]
    input_seconds: Sequence[float]
    """Of I, with R where the stage recomputes."""
    weight_seconds: Sequence[float]
    held: Sequence[float]
    """The part of the limit that a micro-batch takes from the start of its F to the end of its I."""
    deferred: Sequence[float]
    """The part that it takes from then to the end of its W; at most as much."""
    transfer_seconds: Sequence[float]

    @classmethod
    def of_equal_stages(cls, num_stages: int, recomputed: Sequence[bool] | None = None) -> Work:
        """F, R, I and W of one second each, free messages, and 1 of the limit for each stage."""
        ones = [1.0] * num_stages
        input_seconds = [1.0 + again for again in recomputed or [False] * num_stages]
        return cls(ones, input_seconds, ones, ones, ones, [0.0] * (num_stages - 1))


class Listed(NamedTuple):
    """The seconds of a table on the clock of its list scheduling, and the order of each process (F, I and W)."""

    seconds: float
    orders: list[list[Action]]


def best_listed(
    placement: Placement,
    num_micro_batches: int,
    work: Work,
    limits: Sequence[float],
    in_flight: Sequence[float] | None = None,
) -> Listed:
    """The shortest table of all `PRIORITIES`; of equal ones the first.

    Args:
        placement: any; a stage may have replicas.
        num_micro_batches: M.
        work: of the stages.
        limits: the most that each process may hold, on each of its devices.
        in_flight: for each stage the most micro-batches between F and W; None: as many as there is room for.

    Raises:
        ScheduleError: a limit leaves no room for one micro-batch, or all chunks of a row, in all stages of a device.
    """
    every = (listed(placement, num_micro_batches, work, limits, one, in_flight) for one in PRIORITIES)
    return min(every, key=lambda one: one.seconds)


def listed(
    placement: Placement,
    num_micro_batches: int,
    work: Work,
    limits: Sequence[float],
    priority: Sequence[Rule],
    in_flight: Sequence[float] | None = None,
) -> Listed:
    """The table of one order of priority. See `best_listed`."""
    run = _Run(placement, num_micro_batches, work, limits, priority, in_flight)
    orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    for process, action in run.actions():
        orders[process].append(action)
    return Listed(run.seconds, orders)


class _Lane:
    """A stage on one of its workers, its micro-batches in the order of F, I and W, and how many it has done of each."""

    def __init__(
        self, stage: int, process: int, own: Sequence[int], backwards: Sequence[int], ranks: tuple[int, int, int]
    ) -> None:
        self.stage, self.process, self.ranks = stage, process, ranks
        self.own = own, backwards, backwards
        self.done = [0, 0, 0]

    def next(self, kind: int) -> int | None:
        """The next micro-batch of F, I or W."""
        own, done = self.own[kind], self.done[kind]
        return own[done] if done < len(own) else None


class _Place:
    """A device of a process: its stages from the deepest one up, its room in all and left, and when it is free."""

    def __init__(self, room: float) -> None:
        self.lanes: list[_Lane] = []
        self.size = self.room = room
        self.free_at = 0.0


_Next: TypeAlias = tuple[float, int, int, int, _Lane, int]
"""The next action of a place: its start, rank, minus the stage, the index of the kind, the lane and the micro-batch.
The first three decide which of several it is."""


class _Run:
    """One run of the clock."""

    def __init__(
        self,
        placement: Placement,
        num_micro_batches: int,
        work: Work,
        limits: Sequence[float],
        priority: Sequence[Rule],
        in_flight: Sequence[float] | None,
    ) -> None:
        self._work = work
        self._chunks = placement.chunks
        self._seconds = work.forward_seconds, work.input_seconds, work.weight_seconds
        self._in_flight = in_flight or [math.inf] * placement.num_stages
        stages = range(placement.num_stages)
        # For F, I and W of each stage: when what they need of a micro-batch has come.
        self._ready: tuple[list[dict[int, float]], ...] = tuple([{} for _ in stages] for _ in _KINDS)
        self._ready[0][0] = dict.fromkeys(range(num_micro_batches), 0.0)
        self.seconds = 0.0
        self._places: list[_Place] = []
        self._place_at: list[list[int]] = [[] for _ in stages]
        numbers: dict[tuple[int, str | None], int] = {}
        ranks = {rule: rank for rank, rule in enumerate(priority)}
        for stage in reversed(stages):
            half = 2 * stage >= placement.num_stages
            for process in placement.workers[stage]:
                number = numbers.setdefault((process, placement.device_of(stage, process)), len(numbers))
                if number == len(self._places):
                    self._places.append(_Place(limits[process]))
                own = placement.micro_batches_of(stage, process, num_micro_batches)
                backwards = placement.backward_order(own)
                self._places[number].lanes.append(
                    _Lane(stage, process, own, backwards, (ranks[F, half], ranks[I, half], len(ranks)))
                )
                self._place_at[stage].append(number)
        for place in self._places:
            needed = self._chunks * sum(work.held[lane.stage] for lane in place.lanes)
            if needed > place.room:
                what = "one micro-batch" if self._chunks == 1 else f"a row of {self._chunks} chunks"
                raise ScheduleError(
                    f"process {place.lanes[0].process} may hold {place.room:g}, and {what} in its stages "
                    f"takes {needed:g}; let it hold more."
                )

    def actions(self) -> Iterator[tuple[int, Action]]:
        """All actions as (process, action), in the order of their starts."""
        waiting = {n: found for n, place in enumerate(self._places) if (found := self._choose(place))}
        while waiting:
            number = min(waiting, key=lambda n: waiting[n][:3])
            _, _, _, kind, lane, micro_batch = chosen = waiting[number]
            neighbour = self._do(number, chosen)
            yield lane.process, Action(_KINDS[kind], lane.stage, micro_batch)
            for changed in {number, neighbour}:
                if found := self._choose(self._places[changed]):
                    waiting[changed] = found
                else:
                    waiting.pop(changed, None)

    def _choose(self, place: _Place) -> _Next | None:
        """The next action of a place, as far as it is known by now."""
        best: _Next | None = None
        reserved = 0.0
        for lane in place.lanes:
            stage, done = lane.stage, lane.done
            for kind in range(3):
                if (m := lane.next(kind)) is None or (ready := self._ready[kind][stage].get(m)) is None:
                    continue
                if kind == 0 and (
                    self._work.held[stage] + reserved > place.room
                    or done[0] - done[2] >= self._in_flight[stage]
                    or not self._leaves_room_for_rows(place, lane, m)
                ):
                    continue
                start = max(place.free_at, ready)
                if best is None or (start, lane.ranks[kind], -stage) < best[:3]:
                    best = start, lane.ranks[kind], -stage, kind, lane, m
            if lane.next(0) is not None:
                reserved += self._work.held[stage]
        return best

    def _leaves_room_for_rows(self, place: _Place, lane: _Lane, micro_batch: int) -> bool:
        """Whether the oldest row with forwards left on a device finds room for all its chunks after this forward.

        Of the rows before it nothing is left by then. Of later rows, whose backward comes after its own, all is held.
        """
        chunks, held = self._chunks, self._work.held
        if chunks == 1:
            return True  # There is room for one micro-batch in the deeper stages.
        oldest = min(m for one in place.lanes if (m := one.next(0)) is not None) // chunks
        if micro_batch // chunks == oldest:
            return True
        taken = held[lane.stage]
        for one in place.lanes:
            forwards, done = one.own[0], one.done[0]
            after = bisect_left(forwards, (oldest + 1) * chunks)
            if after and forwards[after - 1] // chunks == oldest:
                taken += chunks * held[one.stage]
            taken += max(done - after, 0) * held[one.stage]
        return taken <= place.size

    def _do(self, number: int, chosen: _Next) -> int:
        """Run an action; returns the number of the place that receives its message, or of its own."""
        start, _, _, kind, lane, m = chosen
        stage, place, work = lane.stage, self._places[number], self._work
        place.free_at = end = start + self._seconds[kind][stage]
        self.seconds = max(self.seconds, end)
        lane.done[kind] += 1
        if kind == 2:
            place.room += work.deferred[stage]
            return number
        if kind == 0:
            place.room -= work.held[stage]
            after = stage + 1
        else:
            place.room += work.held[stage] - work.deferred[stage]
            self._ready[2][stage][m] = end
            after = stage - 1
        if after == len(self._place_at):
            self._ready[1][stage][m] = end
            return number
        if after < 0:
            return number
        receiver = self._place_at[after][m // self._chunks % len(self._place_at[after])]
        travels = 0.0 if receiver == number else work.transfer_seconds[min(stage, after)]
        self._ready[kind][after][m] = end + travels
        return receiver
