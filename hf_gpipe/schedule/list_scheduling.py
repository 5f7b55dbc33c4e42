"""Makes tables by list scheduling, under a limit of what a device may hold.

Whenever a device is free, it runs one of the actions that can start: the action that comes first by the rules of its
stage.

The earlier stages wait for the gradient of the inputs (I) of a micro-batch. Only the update waits for the gradient of
the weights (W). So W fills the time in which a device has nothing else to do, or no room for another forward (zero
bubble, arXiv 2401.10241, section 2). How far forwards may run ahead, and with it how much of the bubble can be filled,
is a question of memory alone (controllable memory, arXiv 2405.15362, section 3): a (stage, micro-batch) takes room from
the start of its F to the end of its W. Where a stage may recompute, a forward that finds no room for its graph keeps
its input alone, and R makes the graph anew before I: the newest micro-batch, whose backward comes last, does not keep
its graph (as in `hf_gpipe.schedule.recompute`).

Which rules are best depends on the numbers of stages and micro-batches, on their seconds and on the room. Some orders
of priority (`PRIORITIES`) are always tried. `best_listed` can also search: it changes rules of single stages at random,
and keeps the rules whose table is as short as the shortest table so far. The seed is fixed and the effort is counted in
actions, so the same arguments give the same table. The search begins with few micro-batches, because rules that are
good for few micro-batches are nearly as good for many: with more micro-batches a stage repeats the same actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from random import Random
from typing import TypeAlias

from hf_gpipe.schedule.kinds import FORWARD, INPUT, ActionKind
from hf_gpipe.schedule.listing import Rules, Run, StageRules, Work
from hf_gpipe.schedule.placement import Placement

Rule: TypeAlias = tuple[ActionKind, bool]
"""F or I, and whether of a stage in the second half."""

_F1, _F0, _I1, _I0 = (FORWARD, True), (FORWARD, False), (INPUT, True), (INPUT, False)
PRIORITIES: tuple[tuple[Rule, ...], ...] = (
    (_I1, _F1, _F0, _I0),
    (_F1, _I0, _F0, _I1),
    (_F1, _F0, _I1, _I0),
    (_F1, _I1, _F0, _I0),
    (_I0, _F1, _I1, _F0),
)
"""Orders of priority of F and I; R comes with I, and W last in each. Forwards of the second half of the stages come
before those of the first, for they free room earlier. Over many numbers of stages and micro-batches, one of these five
was as short as the best of all orders with this property."""

#: The share of rules in a search that are drawn anew; the others are changed in one to three places.
_NEW = 0.2
#: The share of a search's effort that goes into few micro-batches, and how many these are for each process.
_FEW, _FEW_OF_PROCESS = 0.6, 2


def best_listed(
    placement: Placement,
    num_micro_batches: int,
    work: Work,
    limits: Sequence[float],
    in_flight: Sequence[float] | None = None,
    effort: int = 0,
) -> Run:
    """The run that makes the shortest table that is found; of equal ones the first.

    Args:
        placement: any; a stage may have replicas.
        num_micro_batches: M.
        work: of the stages.
        limits: the most that each process may hold, on each of its devices.
        in_flight: for each stage the most micro-batches between F and W; None: as many as there is room for.
        effort: of a search for better rules than those of `PRIORITIES`, in actions of tables that are tried.

    Raises:
        ScheduleError: a limit leaves no room for one micro-batch, or a whole group, in all stages of a device.
    """
    starts = [_rules_of(priority, in_flight or [math.inf] * placement.num_stages) for priority in PRIORITIES]

    def run(count: int, rules: Rules, most_seconds: float = math.inf) -> Run:
        return Run(placement, count, work, limits, rules).run(most_seconds)

    if not effort:
        return min((run(num_micro_batches, rules) for rules in starts), key=attrgetter("seconds"))
    few = min(num_micro_batches, _FEW_OF_PROCESS * placement.num_processes)
    rules = min(starts, key=lambda start: run(few, start).seconds)
    search = _Search(placement, work, limits)
    rules, _ = search.climbed(partial(run, few), rules, _FEW * effort)
    _, best = search.climbed(partial(run, num_micro_batches), rules, (1 - _FEW) * effort)
    return best


def _rules_of(priority: Sequence[Rule], in_flight: Sequence[float]) -> Rules:
    ranks = {rule: rank for rank, rule in enumerate(priority)}
    halves = [2 * stage >= len(in_flight) for stage in range(len(in_flight))]
    return tuple(
        StageRules((ranks[FORWARD, half], ranks[INPUT, half], ranks[INPUT, half], len(ranks)), most)
        for half, most in zip(halves, in_flight, strict=True)
    )


class _Search:
    """A walk from rules to rules, at random but always the same."""

    def __init__(self, placement: Placement, work: Work, limits: Sequence[float]) -> None:
        self._random = Random(0)
        self._num_stages = placement.num_stages
        self._recomputes = work.recompute_seconds is not None
        room = [max(limits[process] for process in own) for own in placement.workers]
        #: The most graphs that there is room for, for each stage.
        self._most = [min(int(all_of / held), 99) if held else 99 for all_of, held in zip(room, work.held, strict=True)]

    def climbed(self, run: Callable[..., Run], rules: Rules, effort: float) -> tuple[Rules, Run]:
        """The best rules that are found from some on, and their run; `run` takes rules and the most seconds."""
        best = run(rules)
        effort -= len(best.order)
        while effort > 0:
            other = self._new() if self._random.random() < _NEW else self._changed(rules)
            tried = run(other, best.seconds)
            effort -= len(tried.order)
            # Of equally short ones that with fewer actions: it recomputes less.
            if (tried.seconds, len(tried.order)) <= (best.seconds, len(best.order)):
                rules, best = other, tried
        return rules, best

    def _new(self) -> Rules:
        """One order of priority for all stages, and forwards that run ahead by the depth of the pipeline."""
        random, deepest = self._random, self._num_stages - 1
        slope, spare, waits = random.uniform(0.7, 2), random.randint(1, 3), random.random() < 0.5
        first = random.sample(range(3), 3)
        return tuple(
            StageRules(
                (first[0], first[1], first[2], 3), int(slope * (deepest - stage)) + spare, self._graphs(stage), waits
            )
            for stage in range(self._num_stages)
        )

    def _graphs(self, stage: int) -> float:
        return self._random.randint(0, self._most[stage]) if self._recomputes else math.inf

    def _changed(self, rules: Rules) -> Rules:
        random, other = self._random, list(rules)
        for _ in range(random.choice((1, 1, 2, 3))):
            stage = random.randrange(self._num_stages)
            own, kind = other[stage], random.random()
            if kind < 0.4:
                other[stage] = own._replace(
                    in_flight=max(1, min(own.in_flight, self._num_stages * 3) + random.choice((-1, 1)))
                )
            elif kind < 0.7:
                graphs = min(own.graphs, self._most[stage]) + random.choice((-1, 1))
                other[stage] = own._replace(graphs=max(0, graphs) if self._recomputes else math.inf)
            elif kind < 0.9:
                first, second = random.sample(range(4), 2)
                ranks = list(own.ranks)
                ranks[first], ranks[second] = ranks[second], ranks[first]
                other[stage] = own._replace(ranks=(ranks[0], ranks[1], ranks[2], ranks[3]))
            else:
                other[stage] = own._replace(waits=not own.waits)
        return tuple(other)
