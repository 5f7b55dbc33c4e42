"""The messages between the processes of a table, in one order in which all of them are sent and received.

An NCCL receive occupies the device until its message has come, and a send until its message is received. Whatever makes
the host wait for the whole device meanwhile (the first launch of a kernel, a `cudaFree`, CUDA_LAUNCH_BLOCKING=1) waits
for these kernels too. So a table must also run to its end if every send and every receive blocks its process.

It does so if each message travels right after the action that sends it, in one order of all actions of all processes in
which every action comes after the actions that it needs. In this order the source of a message stands between two
actions of the receiver, and the receiver starts the receive between these two:

- the receive is never started before an own action on which its message depends;
- no two processes wait for each other, also where both send at once;
- all messages from one process to another are sent and received in one order, whichever stages they belong to, so
  they can share a communicator.

The order is that of the starts on a clock with equal stages, so that a receive is started while its source is computed
and the transfer overlaps with the receiver's own work. Of actions that start together, the action that is nearer to the
beginning of its micro-batch's way (down the stages, then up again) comes first, because its receiver is at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.clock import way
from hf_gpipe.schedule.kinds import Resource
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule

#: Fine ticks per tick of a kind. A process starts its actions one after another, at least one fine tick apart.
_FINE = 1000


class Message(NamedTuple):
    """A message between two processes."""

    source: Action
    """Its result is the message; the sender sends it right after this action."""
    consumer: Action
    """The action that needs the message."""
    sender: int
    receiver: int
    before: int
    """Index in the receiver's list of the action before which the receive is started."""


def messages(schedule: Schedule) -> tuple[Message, ...]:
    """Return all messages between processes, in the order in which they travel.

    A process starts the receives with the same `before` in this order.

    Raises:
        ScheduleError: the processes wait for each other.
    """
    if len(schedule.actions) == 1:
        return ()
    passed = [0] * len(schedule.actions)
    sent_messages = []
    for process, action in clock_order(schedule):
        passed[process] += 1
        for consumer in schedule.consumers(action):
            receiver = schedule.worker_of(consumer)
            if receiver != process:
                sent_messages.append(Message(action, consumer, process, receiver, passed[receiver]))
    return tuple(sent_messages)


class Link(NamedTuple):
    """One direction between two processes, from a device of one to a device of the other.

    Its messages are sent and received in one order, so they share a communicator. The other direction has its own:
    messages of one communicator wait for each other.
    """

    sender: int
    receiver: int
    sender_device: str | None
    """The sender's device as the placement names it; None: the process's default device."""
    receiver_device: str | None


def links_between(placement: Placement, stage: int, worker: int, following: int, upper: int) -> tuple[Link, Link]:
    """The links from a stage on one of its workers to a later stage on one of its workers, and back for gradients."""
    devices = placement.device_of(stage, worker), placement.device_of(upper, following)
    return Link(worker, following, *devices), Link(following, worker, *devices[::-1])


def communicators(placement: Placement) -> tuple[Link, ...]:
    """The links between processes, each once, in the order in which all processes create their communicators.

    On NCCL a process has a two-rank communicator for each link that it is an end of.
    """
    return links_of(placement, ((*edge, edge[0] + 1) for edge in placement.edges))


def links_of(placement: Placement, edges: Iterable[tuple[int, int, int, int]]) -> tuple[Link, ...]:
    """The links between processes of edges (stage, its worker, the other stage's worker, the other stage)."""
    links = [link for edge in edges for link in links_between(placement, *edge)]
    ranks_of = placement.ranks_of
    return tuple(dict.fromkeys(link for link in links if ranks_of(link.sender) != ranks_of(link.receiver)))


def num_communicators(placement: Placement, process: int) -> int:
    """The number of two-rank communicators that a process has for messages between stages, on NCCL."""
    return sum(process in (link.sender, link.receiver) for link in communicators(placement))


@lru_cache(maxsize=8)
def executable_order(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """All actions of a table as (process, action), in an order in which each finds the message that it receives.

    Every process takes its actions in its own order. It stops at one whose message has not been sent, and at the U of a
    stage until all the stage's replicas have reached their G.

    Raises:
        ScheduleError: the processes wait for each other; names the action at which the first of them stops.
    """
    workers = schedule.placement.workers
    order: list[tuple[int, Action]] = []
    reached = [0] * len(schedule.actions)
    done: set[Action] = set()
    # An action of a micro-batch stands once in the table, a collective on each replica of its stage.
    num_reached: Counter[Action] = Counter()

    def waits_for(process: int, action: Action) -> Action | None:
        """The actions that must be done in other processes before an action can run."""
        if awaited := schedule.awaited_by(action.kind):
            for other in schedule.concerned(process, action, awaited):
                if other.kind.is_collective and len(workers[action.stage]) not in (1, num_reached[other]):
                    return other
        return next((source for source in schedule.sources(action) if source not in done), None)

    progress = True
    while progress:
        progress = False
        for process, actions in enumerate(schedule.actions):
            while reached[process] < len(actions) and not waits_for(process, action := actions[reached[process]]):
                done.add(action)
                if action.kind.is_collective:
                    num_reached[action] += 1
                order.append((process, action))
                reached[process] += 1
                progress = True

    stopped = []
    for process, actions in enumerate(schedule.actions):
        if reached[process] < len(actions):
            action = actions[reached[process]]
            stopped.append((process, f"process {process} stops at {action}, waiting for {waits_for(process, action)}"))
    if stopped:
        words = "; ".join(text for _, text in stopped[:4])
        raise ScheduleError(
            f"schedule {schedule.name!r}: deadlock: {words}; let one of them come earlier or later.",
            f"process {stopped[0][0]}",
        )
    return tuple(order)


def in_rows(schedule: Schedule, workers: AbstractSet[int]) -> list[tuple[int, Action]]:
    """The actions of some workers as (worker, action): of one its row, of several in the order of the clock."""
    if len(workers) == 1:
        (worker,) = workers
        return [(worker, action) for action in schedule.actions[worker]]
    order = [(worker, action) for worker, action in clock_order(schedule) if worker in workers]
    ends = {worker: schedule.actions[worker][-1] for worker in workers}

    def is_late(worker: int, action: Action) -> bool:
        # What concerns the gradients of a step comes after the numbered actions of all these workers, as does what ends
        # a row.
        if action.kind.resource is Resource.HOST:
            return action == ends[worker]
        return action.kind.is_of_mini_batch and not action.kind.is_numbered

    return sorted(order, key=lambda entry: is_late(*entry))


def clock_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions as (process, action), in the order of their starts on the clock.

    An action starts after the one before it in its list, and after the end of its source, so both come before it. A U
    starts after the G of all replicas.
    """
    started = [-1] * len(schedule.actions)
    free_at: dict[tuple[int, str | None], int] = {}
    ends: dict[Action, int] = {}
    reached_at: dict[Action, int] = {}
    order: list[tuple[int, int, int, Action]] = []
    for process, action in executable_order(schedule):
        place = schedule.placement.place_of(process, action.stage)
        start = max(started[process] + 1, free_at.get(place, 0), *(ends[source] for source in schedule.sources(action)))
        for other in schedule.concerned(process, action, schedule.awaited_by(action.kind)):
            start = max(start, reached_at.get(other, 0))
        if action.kind.is_collective:
            reached_at[action] = max(reached_at.get(action, 0), start + 1)
        started[process] = start
        ends[action] = free_at[place] = start + int(_FINE * action.kind.ticks)
        order.append((start, way(action, schedule.num_stages), process, action))
    return [(process, action) for _, _, process, action in sorted(order)]
