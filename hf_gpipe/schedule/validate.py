"""Checks that a table can be run: that it is complete, in order, and free of deadlock.

The checks go from simple to subtle, so that the first error is the one to correct first:

1. the table's shape fits its placement, and every action stands once, on the process that holds its stage or, of a
   stage with replicas, on the replica that its micro-batch belongs to;
2. nothing is missing: one F for every (stage, micro-batch), and in training one B, or one I and one W; one U for each
   step and replica of a stage, and where a stage has several replicas, one G for each;
3. within a process, an action comes after what it needs of its own stage. In a table of one step updates come last:
   clipping and tied parameters need the gradients of all stages, so no update may stand before another stage's backward
   or reduction. In a window the gradients of a step are complete at its U, and those of the next step begin
   after it; no forward reads a version of the weights that is not there yet;
   reductions stand in one order on all processes, for each is a collective; and what modes need is there;
4. between two processes, messages are received in the order in which they are sent, for an edge keeps no other order;
5. if the actions run one after another, every process reaches its end. Then every process also reaches its end if every
   send and every receive blocks, because of the points at which `messages` starts the receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hf_gpipe.errors import ScheduleError
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import (
    FORWARD,
    KINDS,
    UPDATE,
    ActionKind,
    Fault,
    Resource,
    needs_of,
)
from hf_gpipe.schedule.messages import executable_order
from hf_gpipe.schedule.table import Schedule

_ONE_ROW = "where stages are shared, it stands in the row of one of them."


def check_table(schedule: Schedule) -> None:
    """Check that a table is complete, and that every process can run it to its end.

    Raises:
        ScheduleError: names the first wrong action and what it lacks; its `line` is the line of that process.
    """
    for faults in _CHECKS:
        for problem, where in faults(schedule):
            line = where if isinstance(where, str) else f"process {where}"
            raise ScheduleError(f"schedule {schedule.name!r}: {problem}", line)
    executable_order(schedule)


def _of_shape(schedule: Schedule) -> Iterator[Fault]:
    num_stages, num_micro_batches, placement = schedule.num_stages, schedule.num_micro_batches, schedule.placement
    if num_stages < 1 or num_micro_batches < 1:
        yield (
            f"num_stages is {num_stages} and num_micro_batches is {num_micro_batches}; both must be at least 1.",
            "num_stages" if num_stages < 1 else "num_micro_batches",
        )
    if num_micro_batches % placement.group_size or (placement.group_size > 1 and schedule.is_window):
        yield groups.fault(placement.group_size, num_micro_batches), groups.KEY
    if placement.num_stages != num_stages:
        yield (
            f"the placement is of {placement.num_stages} stages and the table of {num_stages}; name one process for "
            "each stage, or for each of its replicas.",
            "placement",
        )
    if placement.num_processes != len(schedule.actions):
        yield (
            f"the placement is on {placement.num_processes} processes and the table has the actions of "
            f"{len(schedule.actions)}; give each process of the placement its line.",
            placement.num_processes if placement.num_processes < len(schedule.actions) else "placement",
        )
    if schedule.steps is not None and (sum(schedule.steps) != num_micro_batches or min(schedule.steps, default=0) < 1):
        yield (
            f"the steps have {list(schedule.steps)} micro-batches and the table {num_micro_batches}; each step has at "
            "least one, and together they have all.",
            "steps",
        )


def _of_places(schedule: Schedule) -> Iterator[Fault]:
    for process, row in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in row:
            if not 0 <= action.stage < schedule.num_stages:
                yield f"{action} on process {process}: the stages are 0 to {schedule.num_stages - 1}.", process
            if action.micro_batch is not None and not 0 <= action.micro_batch < schedule.num_micro_batches:
                yield (
                    f"{action} on process {process}: the micro-batches are 0 to {schedule.num_micro_batches - 1}.",
                    process,
                )
            if action.step >= schedule.num_steps and not action.kind.is_numbered:
                yield f"{action} on process {process}: the steps are 0 to {schedule.num_steps - 1}.", process
            if (problem := _wrong_home(schedule, process, action)) is not None:
                yield problem, process
            if action in seen:
                yield f"{action} occurs twice on process {process}; keep one of them.", process
            if action.kind.is_collective and len(schedule.placement.workers[action.stage]) == 1:
                yield (
                    f"{action} on process {process}: stage {action.stage} has no other replica to {action.kind.word} "
                    "its gradients with; leave it out.",
                    process,
                )
            seen.add(action)


def _wrong_home(schedule: Schedule, process: int, action: Action) -> str | None:
    """An action stands where the weights of its stage are, and with the other actions of its micro-batch.

    Everything else takes the worker of an action from its row.
    """
    own, homes = schedule.placement.workers[action.stage], _homes(schedule, action)
    is_shared = schedule.placement.is_shared
    if is_shared and not (action.micro_batch is None and not action.kind.is_numbered):
        own = tuple(range(len(schedule.actions)))
    if process not in own:
        problem = f"stage {action.stage} is placed on {' and '.join(map(str, own))}"
    elif process in homes:
        return None
    elif is_shared:
        return (
            f"{action} is on process {process}, and the pipeline of its micro-batch has the processes {list(homes)}; "
            "move it to one of them."
        )
    else:
        row = f"{action.micro_batch}{f' // {schedule.group_size}' if schedule.group_size > 1 else ''}"
        problem = (
            f"micro-batch {action.micro_batch} belongs to replica {row} % {len(own)} of stage {action.stage}, on "
            f"{homes[0]}"
        )
    return f"{action} is on process {process}, but {problem}; move it there."


def _homes(schedule: Schedule, action: Action) -> tuple[int, ...]:
    """The processes on which an action stands: one, or for G and U every replica of its stage. Of shared
    stages those on one of which an action of a micro-batch, or one that is numbered, stands."""
    placement = schedule.placement
    if action.micro_batch is not None:
        return placement.pipeline_of(placement.worker_of(action.stage, action.micro_batch))
    if placement.is_shared and action.kind.is_numbered:
        return tuple(range(len(schedule.actions)))
    return placement.workers[action.stage]


def _of_missing(schedule: Schedule) -> Iterator[Fault]:
    is_shared, rows = schedule.placement.is_shared, [set(row) for row in schedule.actions]

    def missing(action: Action) -> Iterator[Fault]:
        homes = _homes(schedule, action)
        if is_shared and action.micro_batch is not None:
            count = sum(action in rows[home] for home in homes)
            if count != 1:
                yield f"{action} stands on {count} of the processes {list(homes)}; {_ONE_ROW}", homes[0]
            return
        for home in homes:
            if action not in rows[home]:
                yield f"{action} is missing from process {home}; {action.kind.rule}", home

    placed = set[Action]().union(*rows)
    is_training, has_optional = schedule.is_training, any(kind.is_optional for kind in schedule.kinds)
    every = [kind for kind in KINDS.values() if kind.rule and (has_optional or not kind.is_optional)]
    required = [kind for kind in every if is_training or not kind.in_training_only]
    for kind in required:
        parts = [part for part in required if part.part_of == kind]
        for action in () if kind.part_of else _all_of(schedule, kind):
            of_parts = [replace(action, kind=part) for part in parts]
            if placed.isdisjoint(of_parts):
                yield from missing(action)
                continue
            for part in of_parts:
                yield from missing(part)
            if action in placed:
                home = _homes(schedule, action)[0]
                both = f"{action} and {of_parts[0]} are both on process {home}"
                yield f"{both}; keep {kind}, or {' and '.join(parts)}.", home
    for process, row in enumerate(schedule.actions if not is_training else ()):
        for action in row:
            if action.kind.in_training_only:
                yield f"{action} without any backward: a table without backwards has forwards only.", process


def _all_of(schedule: Schedule, kind: ActionKind) -> Iterator[Action]:
    """All actions of a kind that a table can have."""
    for stage, count in enumerate(schedule.placement.replicas):
        if kind.is_of_mini_batch and (count > 1 or not kind.is_collective):
            yield from (Action(kind, stage, step=step) for step in range(schedule.num_steps))
        elif not kind.is_of_mini_batch:
            yield from (Action(kind, stage, micro_batch) for micro_batch in range(schedule.num_micro_batches))


def _of_order_in_process(schedule: Schedule) -> Iterator[Fault]:
    for process, row in enumerate(schedule.actions):
        place = {action: index for index, action in enumerate(row)}
        first_update: Action | None = None
        for index, action in enumerate(row):
            for needed in _needs_of_own_stage(schedule, process, action):
                if place.get(needed, -1) > index:
                    yield (
                        f"{action} comes before {needed}, which it needs, on process {process}; move it behind.",
                        process,
                    )
            if action.kind.resource is Resource.HOST:
                continue
            if action.kind.changes_weights:
                first_update = first_update or action
            elif first_update is not None and not schedule.is_window:
                yield f"{action} comes after {first_update} on process {process}: updates come last.", process


def _needs_of_own_stage(schedule: Schedule, process: int, action: Action) -> list[Action]:
    """The actions of the same process that an action needs. A table without them is complete all the same."""
    needs = list(schedule.concerned(process, action, needs_of(action.kind)))
    if (before := schedule.before_in_group(action)) is not None:
        needs.append(before)
    step = action.step if action.micro_batch is None else schedule.step_of[action.micro_batch]
    if step and action.kind.after_update:
        # The gradients of the step before are dropped at its update.
        needs.append(Action(UPDATE, action.stage, step=step - 1))
    return needs


def _of_modes(schedule: Schedule) -> Iterator[Fault]:
    """Faults that modes find (`hf_gpipe.modes`)."""
    for faults in functions_of_modes("table", "faults"):
        yield from faults(schedule)


def _of_versions(schedule: Schedule) -> Iterator[Fault]:
    """Every version of the weights that a forward names is there when it is read."""
    if not schedule.stashes and (schedule.versions or not schedule.is_window):
        also = "names versions" if schedule.versions else "has one step"
        yield f"it keeps no stashes (stashes: no), and {also}; leave the one or the other out.", "stashes"
    last = None
    for stage, micro_batch, version in sorted(schedule.versions):
        newest = schedule.newest_version.get((stage, micro_batch))
        word = f"{Action(FORWARD, stage, micro_batch)}@{version}"
        if newest is None or last == (stage, micro_batch):
            yield f"{word}: the table has no such forward, or names two versions of it.", 0
        elif version > newest:
            yield (
                f"{word}: before it stage {stage} has {newest} updates, so its versions are 0 to {newest}.",
                schedule.placement.workers[stage][0],
            )
        last = stage, micro_batch


def _of_order_of_reductions(schedule: Schedule) -> Iterator[Fault]:
    """One after another in the order of each process, the reductions come to an end: each waits for all replicas."""
    queues = [[a for a in actions if a.kind.is_collective] for actions in schedule.actions]
    while any(queues):
        for queue in queues:
            workers = schedule.placement.workers[queue[0].stage] if queue else ()
            if queue and all(queues[process][:1] == queue[:1] for process in workers):
                for process in workers:
                    queues[process] = queues[process][1:]
                break
        else:
            first = next(process for process, queue in enumerate(queues) if queue)
            words = "; ".join(f"process {process} at {queue[0]}" for process, queue in enumerate(queues) if queue)
            yield f"the reductions wait for each other: {words}; let them stand in one order.", first


def _of_order_on_edges(schedule: Schedule) -> Iterator[Fault]:
    """Messages of one kind from a stage on one process to a stage on another are received in the order of sending."""
    sent: dict[tuple[str, int, int, int, int], list[Action]] = {}
    received: dict[tuple[str, int, int, int, int], list[Action]] = {}

    def note(
        messages: dict[tuple[str, int, int, int, int], list[Action]], entry: Action, source: Action, to: Action
    ) -> None:
        sender, receiver = schedule.worker_of(source), schedule.worker_of(to)
        if sender != receiver:
            # A carry of shared stages is for a forward or a recomputation, each in an order of its own.
            kind = "" if source.kind.takes_gradient else source.kind + ("" if to.kind.sends else to.kind)
            messages.setdefault((kind, source.stage, to.stage, sender, receiver), []).append(entry)

    for actions in schedule.actions:
        for action in actions:
            for consumer in schedule.consumers(action):
                note(sent, action, action, consumer)
            for source in schedule.sources(action):
                note(received, action, source, action)
    for edge, messages in sent.items():
        for sender, receiver in zip(messages, received[edge], strict=True):
            if sender not in schedule.sources(receiver):
                yield (
                    f"{receiver} takes the message of {sender}: stage {receiver.stage} must receive in the order in "
                    f"which stage {sender.stage} sends; change one of the two orders.",
                    schedule.worker_of(receiver),
                )


#: From simple to subtle; each takes for granted what those before it have checked.
_CHECKS: tuple[Callable[[Schedule], Iterator[Fault]], ...] = (
    *(_of_shape, _of_places, _of_missing, _of_modes, _of_order_in_process),
    *(_of_versions, _of_order_of_reductions, _of_order_on_edges),
)
