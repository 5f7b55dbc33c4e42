"""A clock over a table, which tells how long a step takes and how much of that time is idle.

The clock models the executor. A process starts its actions in order, and a device runs one at a time. A message leaves
when its action ends and never holds up the sender; it travels `transfer_seconds`, after the messages before it on the
same edge and in the same direction; the receiver waits for it at the action that uses it. An edge lies between two
stages and two of their workers. Between two stages of one process on one device nothing travels.

The kind of an action says what the action occupies: the device, or a resource beside the device, which takes no time of
the worker. A copy begins when its engine is free. If its kind needs actions on the device, it also begins after the
actions that stand before it on the device. An L takes the room of weights from the moment when the device has come to
their D, whose copy is of gradients alone. A reduction (G) begins when all replicas of its stage have reached their G
and none of them is in another reduction, and takes `reduce_seconds`. Both go on beside the workers' next actions, until
an action that needs them waits for them: U for G. The clock does not model that messages and reductions share a link,
nor that reductions begin inside the last B.

All arithmetic has the type of the given costs: with `fractions.Fraction` every result is exact. With equal stages, free
transfers and updates, and each stage in its own process, one step of `gpipe` on K stages and M micro-batches takes

    without recomputation   (M+K-1) (F+B)            bubble (K-1) / (M+K-1)
    with recomputation      (M+K-1) (F+B) + M R      bubble (K-1) (F+B) / ((M+K-1) (F+B) + M R)

so recomputation costs each stage its own M R and nothing else. While the pipeline fills and drains, recomputation hides
in the time in which the stages before the last stage wait for their first gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import KINDS, ActionKind, Resource, needs_of
from hf_gpipe.schedule.messages import executable_order
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule

Seconds: TypeAlias = float | Fraction
OfStages: TypeAlias = Seconds | Sequence[Seconds | Sequence[Seconds]]


@dataclass(frozen=True)
class Costs:
    """The costs of one micro-batch: one value for all stages (or boundaries), or a sequence with one for each.

    Where micro-batches are in groups, the value of a stage may be a sequence too, with one for each member.
    """

    forward_seconds: OfStages
    """The time of F of one micro-batch, for each stage (K values)."""
    backward_seconds: OfStages
    """The time of B of one micro-batch, for each stage."""
    recompute_seconds: OfStages | None = None
    """The time of R of one micro-batch, for each stage. None: as long as the forward."""
    update_seconds: Seconds | Sequence[Seconds] = 0
    """The time of a stage's update, once in a step."""
    transfer_seconds: Seconds | Sequence[Seconds] | Mapping[tuple[int, int, int], Seconds] = 0
    """The time of a message in either direction, for each boundary (K-1 values, boundary s lies between stages s and
    s+1), or for each of `Placement.edges`."""
    reduce_seconds: Seconds | Sequence[Seconds] = 0
    """The time of the reduction of a stage's gradients over its replicas. A stage without replicas has none."""
    input_seconds: OfStages | None = None
    """The time of I, the gradient of the stage's inputs. None: half of the backward."""
    weight_seconds: OfStages | None = None
    """The time of W, the gradients of the stage's weights. None: half of the backward."""
    others: Mapping[str, Seconds | Sequence[Seconds]] | None = None
    """The times of kinds of actions whose record names no field of this class, by letter. A missing kind takes 0."""
    turn_transfer_seconds: Seconds = 0
    """The time of the messages to actions of the first turn, and from those of the last."""

    def of(self, kind: ActionKind) -> tuple[str, OfStages, Fraction | int]:
        """The price of an action of a kind: the name of the cost, the cost, and the share of it."""
        for name, share in kind.price:
            if (value := getattr(self, name)) is not None:
                return name, value, share
        return "others", (self.others or {}).get(kind, 0), 1

    @classmethod
    def from_kinds(cls, seconds: Mapping[ActionKind, Sequence[Seconds]]) -> Costs:
        """The costs of kinds whose actions compute, one sequence for each; messages take no time."""
        named: dict[str, Any] = {}
        for kind, value in seconds.items():
            if kind.price:
                # A stage has U or H.
                earlier = named.get(kind.price[0][0], [0] * len(value))
                named[kind.price[0][0]] = [total + cost for total, cost in zip(earlier, value, strict=True)]
        return cls(**named, others={kind: value for kind, value in seconds.items() if not kind.price})


class Span(NamedTuple):
    """One action that a process ran: it started, waited, computed and sent, between `start` and `end` (seconds).

    One that occupies another resource than the device runs from `start` to `end` beside the actions that follow it.
    """

    process: int
    action: Action
    start: Seconds
    end: Seconds
    waiting: Seconds = 0
    """The part of the span, at its beginning, in which the process was idle."""
    sending: Seconds = 0
    """The part of the span, at its end, in which the process sent its message."""

    @property
    def computes(self) -> Seconds:
        """When the waiting was over."""
        return self.start + self.waiting

    @property
    def busy(self) -> Seconds:
        """Computing and sending."""
        return self.end - self.start - self.waiting

    @property
    def computing(self) -> Seconds:
        return self.busy - self.sending


@dataclass(frozen=True)
class Timeline:
    """When each action of a table ran, predicted by `simulate` or measured, in seconds from the step's start."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """Ordered by process, then by start."""

    @classmethod
    def from_spans(cls, schedule: Schedule, spans: Iterable[Span]) -> Timeline:
        """A timeline from measured spans, of all processes and on one clock; the earliest start becomes 0."""
        spans = sorted((Span(*span) for span in spans), key=lambda span: (span.process, span.start))
        origin = min((span.start for span in spans), default=0)
        shifted = (span._replace(start=span.start - origin, end=span.end - origin) for span in spans)
        return cls(schedule, tuple(shifted))

    @cached_property
    def total_seconds(self) -> Seconds:
        """Seconds from the start of the first action to the end of the last one."""
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def bubble(self) -> Seconds:
        """The idle fraction of all processes together, 0 to 1; of all their devices where they have several. A
        reduction is not work of its process, as a message."""
        placement = self.schedule.placement
        devices = {placement.place_of(process, stage) for stage, process in placement.places}
        available = len(devices) * self.total_seconds
        return 1 - _busy(self.spans) / available if available else 0

    def busy_seconds(self, stage: int) -> Seconds:
        """How long the actions of a stage ran, without their waiting; the mean of its replicas."""
        return _busy(self._by_stage.get(stage, ())) / len(self.schedule.placement.workers[stage])

    @cached_property
    def by_process(self) -> Mapping[int, Sequence[Span]]:
        """The spans of each process, by their start."""
        return _grouped(self.spans, lambda span: span.process)

    @cached_property
    def _by_stage(self) -> Mapping[int, Sequence[Span]]:
        return _grouped(self.spans, lambda span: span.action.stage)

    @cached_property
    def ends(self) -> Mapping[tuple[int, Action], Seconds]:
        """The time at which each action ended, by process."""
        return {(span.process, span.action): span.end for span in self.spans}

    @cached_property
    def left_at(self) -> Mapping[tuple[int, Action], Seconds]:
        """The time at which gradients that an action copies leave their device, by process: when the next ones begin
        to leave, or at the end of the copy where there are no next ones."""
        left: dict[tuple[int, Action], Seconds] = {}
        before: dict[tuple[int, str | None], Action] = {}
        for process, action, start, end, *_ in self.spans:
            if action.kind.carries_gradients and not self.schedule.does_nothing(process, action):
                place = self.schedule.placement.place_of(process, action.stage)
                if place in before:
                    left[process, before[place]] = start
                left[process, action], before[place] = end, action
        return left

    @cached_property
    def spans_of(self) -> tuple[Mapping[int, list[Span]], ...]:
        """The spans of the actions of each stage and micro-batch, in order. They all run on one replica."""
        stages: tuple[defaultdict[int, list[Span]], ...]
        stages = tuple(defaultdict(list) for _ in range(self.schedule.num_stages))
        for span in self.spans:
            if span.action.micro_batch is not None:
                stages[span.action.stage][span.action.micro_batch].append(span)
        return stages


def _grouped(spans: Iterable[Span], key: Callable[[Span], int]) -> Mapping[int, Sequence[Span]]:
    groups: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        groups[key(span)].append(span)
    return groups


def _busy(spans: Iterable[Span]) -> Seconds:
    return sum(span.busy for span in spans if span.action.kind.resource is Resource.COMPUTE)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Predict one step of a valid table.

    Raises:
        ScheduleError: a sequence of costs that does not fit the stages, a negative cost, or a table that deadlocks.
    """
    # A stable sort: what starts at the same time stays in the order of its process.
    spans = sorted(_Clock(schedule, costs).step(), key=lambda span: (span.process, span.start))
    return Timeline(schedule, tuple(spans))


def seconds_of_steps(schedule: Schedule, costs: Costs, num_steps: int) -> Seconds:
    """Predict the time of consecutive steps in which a process waits for nothing but its messages and reductions.

    It begins its next step when its own updates are done. So it is where nothing needs the gradients of all stages
    before an update, or where updates are checked afterwards (zero bubble, arXiv 2401.10241, section 4). A process that
    is done early then begins the next step early.

    Raises:
        ScheduleError: as `simulate`.
    """
    clock = _Clock(schedule, costs)
    return max((span.end for _ in range(num_steps) for span in clock.step()), default=0)


_Lane: TypeAlias = tuple[int, str | None, Resource]
"""A resource of a device of a process; a link and the host are the whole process's, whose device is None here."""


class _Clock:
    """The times of one step after another."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        num_stages = schedule.num_stages

        #: The seconds of each kind and stage: a number for each member of a group, or one for all.
        self._seconds: dict[ActionKind, list[tuple[Seconds, ...]]] = {}
        for kind in KINDS.values():
            name, value, share = costs.of(kind)
            stages = value if isinstance(value, Sequence) else (value,) * num_stages
            _check_count(stages, num_stages, name, "stages")
            self._seconds[kind] = [_each_member(of_stage, schedule.group_size, name, share) for of_stage in stages]
        self._transfer_seconds = _of_edges(costs.transfer_seconds, schedule)
        self._turn_seconds = costs.turn_transfer_seconds
        self._schedule = schedule
        self._order = executable_order(schedule)
        self._free_at: dict[_Lane, Seconds] = {}
        self._started: list[Seconds] = [0] * schedule.placement.num_processes
        self._edge_free_at: dict[tuple[bool, bool, int, int, int], Seconds] = {}

    def step(self) -> list[Span]:
        """The next step; all times are from the start of the first one."""
        schedule, placement, seconds = self._schedule, self._schedule.placement, self._seconds
        free_at, started, edge_free_at = self._free_at, self._started, self._edge_free_at
        spans: list[Span] = []
        arrives_at: dict[tuple[Action, Action], Seconds] = {}
        reached_at: defaultdict[Action, list[Seconds]] = defaultdict(list)
        #: The time from which actions that wait for another one may begin, by process: mostly the end of that one.
        ends_at: dict[tuple[int, Action], Seconds] = {}
        #: The time at which everything but the updates has ended, of a table whose stages are shared.
        all_end: Seconds = 0

        def collect() -> None:
            """The collectives that all replicas have reached by now, in the order in which these did."""
            every = [
                collective
                for collective, times in reached_at.items()
                if len(times) == len(placement.workers[collective.stage])
            ]
            for action in sorted(every, key=lambda collective: (max(reached_at[collective]), -collective.stage)):
                lanes = [_lane_of(placement, process, action) for process in placement.workers[action.stage]]
                start = max(*reached_at.pop(action), *(free_at.get(lane, 0) for lane in lanes))
                end = start + seconds[action.kind][action.stage][0]
                for lane in lanes:
                    free_at[lane] = ends_at[lane[0], action] = end
                    spans.append(Span(lane[0], action, start, end))

        # Those of a synchronous table come last on every process: all reductions are known by then.
        updates_last = (placement.has_replicas or placement.is_shared) and not schedule.is_window
        order = sorted(self._order, key=lambda entry: updates_last and _is_update_of_all(entry[1].kind))
        for process, action in order:
            kind, lane = action.kind, _lane_of(placement, process, action)
            start = started[process]
            if _is_update_of_all(kind):
                # Gradients are on their way to the host.
                start = max(start, free_at.get((*placement.place_of(process, action.stage), Resource.COPY_OUT), 0))
                if placement.is_shared:
                    # Other workers have added to the gradients of its stage.
                    all_end = all_end or max(span.end for span in spans)
                    start = max(start, all_end)
            if kind.resource is not Resource.COMPUTE and any(
                need.resource is Resource.COMPUTE for need in needs_of(kind)
            ):
                start = free_at.get((*placement.place_of(process, action.stage), Resource.COMPUTE), 0)
            if kind.is_collective:
                reached_at[action].append(start)
                continue
            reached = start
            arrivals = (arrives_at[source, action] for source in schedule.sources(action))
            start = max(start, free_at.get(lane, 0), *arrivals)
            if awaited := schedule.awaited_by(kind):
                collect()
                for other in schedule.concerned(process, action, awaited):
                    start = max(start, ends_at.get((process, other), 0))
            of_members = seconds[kind][action.stage]
            end = start + of_members[(action.micro_batch or 0) % len(of_members)]
            if schedule.does_nothing(process, action):
                start = end = reached
            else:
                if kind.is_paced:
                    computing = (*placement.place_of(process, action.stage), Resource.COMPUTE)
                    free_at[computing] = max(free_at.get(computing, 0), free_at.get(lane, 0))
                free_at[lane] = end
            spans.append(Span(process, action, start, end))
            if kind.resource is Resource.COMPUTE:
                started[process] = start
            else:
                ends_at[process, action] = reached if kind.carries_gradients else end
            for consumer in schedule.consumers(action):
                arrives_at[action, consumer] = end
                target = schedule.worker_of(consumer)
                if placement.place_of(process, action.stage) != placement.place_of(target, consumer.stage):
                    is_of_turn = bool(action.kind.turn or consumer.kind.turn)
                    edge = (is_of_turn, action.stage > consumer.stage, action.stage, process, target)
                    travels_from = max(end, edge_free_at.get(edge, 0))
                    edge_free_at[edge] = travels_from + self._seconds_of_message(action, process, consumer, target)
                    arrives_at[action, consumer] = edge_free_at[edge]
        return spans

    def _seconds_of_message(self, action: Action, process: int, consumer: Action, target: int) -> Seconds:
        if action.kind.is_signal:
            return 0
        if action.kind.turn or consumer.kind.turn:
            # Between two turns there are a few numbers for each token.
            return 0 if action.kind.turn == 1 else self._turn_seconds
        lower, upper = (process, target) if action.stage < consumer.stage else (target, process)
        return self._transfer_seconds[min(action.stage, consumer.stage), lower, upper]


def _is_update_of_all(kind: ActionKind) -> bool:
    """Whether an update comes after everything else of a synchronous step; one on the host needs its own stage's."""
    return kind.changes_weights and kind.resource is Resource.COMPUTE


def _lane_of(placement: Placement, process: int, action: Action) -> _Lane:
    """The resource that an action occupies."""
    resource = action.kind.resource
    of_process = resource in (Resource.LINK, Resource.HOST)
    return process, None if of_process else placement.device_of(action.stage, process), resource


def _of_edges(
    value: Seconds | Sequence[Seconds] | Mapping[tuple[int, int, int], Seconds], schedule: Schedule
) -> Mapping[tuple[int, int, int], Seconds]:
    """One value for each edge, from those of the boundaries."""
    edges = schedule.placement.edges
    if not isinstance(value, Mapping):
        of_boundary = _each(value, schedule.num_stages - 1, "transfer_seconds", "boundaries")
        return {edge: of_boundary[edge[0]] for edge in edges}
    if missing := set(edges) - set(value):
        raise ScheduleError(f"transfer_seconds has no value for the edge {min(missing)}; give one for each edge.")
    _each(list(value.values()), len(value), "transfer_seconds", "edges")
    return value


def _each(value: Seconds | Sequence[Seconds], count: int, name: str, of_what: str) -> tuple[Seconds, ...]:
    """One value for each boundary, edge or member of a group."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * count
    _check_count(values, count, name, of_what)
    if any(cost < 0 for cost in values):
        raise ScheduleError(f"{name} is {min(values)} somewhere; a cost is never below 0.")
    return values


def _each_member(
    value: Seconds | Sequence[Seconds], group_size: int, name: str, share: Fraction | int
) -> tuple[Seconds, ...]:
    """A share of the value of a stage for each member of a group, or of its only one."""
    values = _each(value, group_size if isinstance(value, Sequence) else 1, name, groups.MEMBERS)
    return values if share == 1 else tuple(cost * share for cost in values)


def _check_count(values: Sequence[object], count: int, name: str, of_what: str) -> None:
    if len(values) != count:
        raise ScheduleError(
            f"{name} has {len(values)} values for {count} {of_what}; give one for each, or one number for all."
        )
