"""Faults of tables with visits, with updates on the host, or with shared stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.late_updates import faults_of_late_updates
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD, UPDATE, Fault, Held
from hf_gpipe.schedule.table import Schedule


def faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield them."""
    yield from _of_shared_stages(schedule)
    yield from _of_host_updates(schedule)
    yield from faults_of_late_updates(schedule)
    yield from _of_visits(schedule)


def _of_shared_stages(schedule: Schedule) -> Iterator[Fault]:
    """A shared stage finds what an action needs on the action's worker, wherever others of its micro-batch are."""
    if not schedule.placement.is_shared:
        return
    if schedule.group_size > 1 or schedule.is_window:
        what: int | str = groups.KEY if schedule.group_size > 1 else "steps"
        yield "its stages are shared, so its rows are whole, and it has one step.", what
    numbers: dict[Action, int] = {}
    for process, row in enumerate(schedule.actions):
        makers: dict[int, set[int | None]] = {}
        visiting = {action.stage for action in row if action.kind == LOAD}
        for action in row:
            if action.kind.is_numbered and numbers.setdefault(action, process) != process:
                problem = "visits of a shared stage are numbered over all processes"
                yield f"{action} is on processes {numbers[action]} and {process}: {problem}.", process
            if action.micro_batch is None:
                continue
            if action.stage not in visiting and schedule.is_training:
                yield f"{action} without an L of stage {action.stage}, which is dealt; write L before.", process
            graphs = makers.setdefault(action.stage, set())
            if Held.GRAPH in action.kind.frees and action.micro_batch not in graphs:
                problem = f"{action} finds no graph on process {process}: its forward is on another one"
                yield f"{problem}; write R before it.", process
            if action.kind.makes is Held.GRAPH:
                graphs.add(action.micro_batch)
                if action.stage == schedule.num_stages - 1 and not action.kind.sends:
                    forward = Action(FORWARD, action.stage, action.micro_batch)
                    if schedule.worker_of(forward) != process:
                        yield f"{action}: the last stage's loss stays on the process of {forward}.", process


def _of_host_updates(schedule: Schedule) -> Iterator[Fault]:
    """Updates on the host are of shared stages without replicas. Each row ends with such an update, which waits for the
    others, and no weight visits its owner's device afterwards."""
    placement = schedule.placement
    for process, row in enumerate(schedule.actions if HOST_UPDATE in schedule.kinds else ()):
        first = next((action for action in row if action.kind == HOST_UPDATE), None)
        if first is not None and (not placement.is_shared or placement.has_replicas):
            yield (
                f"{first} on process {process}: H updates a stage that is dealt and has no replicas; write "
                f"{replace(first, kind=UPDATE)} at the end.",
                process,
            )
        updated: set[int] = set()
        for action in row:
            if action.kind == HOST_UPDATE:
                updated.add(action.stage)
            elif action.stage in updated:
                update = Action(HOST_UPDATE, action.stage)
                yield f"{action} comes after {update} on process {process}; move it before.", process
        if row[-1].kind != HOST_UPDATE:
            yield (
                f"the row of process {process} ends with {row[-1]}: where a table has H, no stage has U, and each row "
                "ends with an H; move the last one there.",
                process,
            )


def _of_visits(schedule: Schedule) -> Iterator[Fault]:
    """A stage whose weights visit has them wherever it reads them."""
    for process in range(len(schedule.actions)):
        if (problem := _wrong_visit(schedule, process)) is not None:
            yield f"{problem}; write L before and D after a run of a stage's actions.", process
    if schedule.is_window and LOAD in schedule.kinds:
        yield "its weights change within the table, so they cannot visit; leave L and D out.", "steps"


def _wrong_visit(schedule: Schedule, worker: int) -> str | None:
    """The first fault in the visits of a worker's row, as a sentence; None: there is none."""
    row = schedule.actions[worker]
    visiting = {action.stage for action in row if action.kind in (LOAD, DROP)}
    there: dict[int, Action] = {}
    num_visits: defaultdict[int, int] = defaultdict(int)
    graphs: defaultdict[int, int] = defaultdict(int)
    for action in row:
        stage = action.stage
        if action.kind in (LOAD, DROP):
            expected = num_visits[stage]
            if schedule.placement.is_shared:
                # Numbered over all rows.
                expected = there[stage].step if stage in there else max(action.step, expected)
            is_next = (action.kind == DROP) == (stage in there) and action.step == expected
            if not is_next:
                return f"{action} is not the next L or D of stage {stage}: they alternate, and are numbered from 0"
            if action.kind == LOAD:
                there[stage] = action
                continue
            if graphs[stage]:
                return f"{action} comes while stage {stage} holds an autograd graph, which may keep its weights"
            del there[stage]
            num_visits[stage] = action.step + 1
        elif action.micro_batch is not None and stage in visiting:
            if stage not in there:
                return f"{action} comes while the weights of stage {stage} are on the host, between its D and its L"
            graphs[stage] += schedule.graphs_made(action)
    return f"{next(iter(there.values()))} has no D" if there else None
