"""Visits of a stage's weights on a device: L loads the weights from the host, and D drops them at the end of the visit.

A process whose stages do not fit its device together keeps their weights on the host. It runs the actions of one stage
after the other, so only the stage at work and the stage after it need their weights on the device. So L of the next
stage stands before the actions of the stage at work and copies beside them, and D stands after the last action of a
stage's run.

An autograd graph may keep weights alive, so a visit lasts until its stage holds no graph. With recomputation a graph is
made and used up in one run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.visits import round_robin as round_robin
from hf_gpipe.modes.visits.faults import faults as faults
from hf_gpipe.modes.visits.host_updates import with_updates_beside as with_updates_beside
from hf_gpipe.modes.visits.late_updates import with_late_updates as with_late_updates
from hf_gpipe.modes.visits.visit import DROP, LOAD, visits
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule

if TYPE_CHECKING:  # settings are made after tables
    from hf_gpipe.settings.pipeline import DecidedConfig


def complete(schedule: Schedule, config: DecidedConfig) -> Schedule:
    """The table with L and D, where weights visit, and with A, where trained ones do.

    Raises:
        ScheduleError: the table of a file lets weights of other stages visit.
    """
    if not config.visits.offload_weights:
        return schedule
    stay = stages_that_stay(schedule.placement, config.visits.resident_stages)
    if LOAD in schedule.kinds and (other := sorted(stay & visiting_stages(schedule))):
        raise ScheduleError(
            f"the table {schedule.name!r} loads stage {other[0]} (L), and with resident_stages "
            f"{config.visits.resident_stages} its weights stay; leave its L and D out, or resident_stages."
        )
    visiting = with_visits(schedule, stay)
    return with_late_updates(visiting) if config.visits.offload_weights == "all" else visiting


def stages_that_stay(placement: Placement, count: int) -> frozenset[int]:
    """The stages whose weights stay on their devices, so many on each device.

    They are spread evenly, so that the weights of a stage have the time of the stages between it and the one before to
    come; the last stage of a device is the first that stays.
    """
    of_devices: defaultdict[object, list[int]] = defaultdict(list)
    for stage, workers in enumerate(placement.workers):
        of_devices[placement.place_of(workers[0], stage)].append(stage)
    return frozenset(
        stage
        for own in of_devices.values()
        for place, stage in enumerate(own)
        if (place + 1) * count // len(own) > place * count // len(own)
    )


def visiting_stages(schedule: Schedule) -> frozenset[int]:
    """The stages whose weights visit in a table."""
    return frozenset(action.stage for row in schedule.actions for action in row if action.kind == LOAD)


def check(schedule: Schedule, config: DecidedConfig) -> None:
    """`check_visits`, where weights visit."""
    if config.visits.offload_weights:
        check_visits(schedule, are_trained=config.visits.offload_weights == "all")


@lru_cache(maxsize=64)
def with_visits(schedule: Schedule, stay: frozenset[int] = frozenset()) -> Schedule:
    """Put an L and a D around each run of a stage's actions on its device. A table that has them is returned as it is.

    Without backwards, each process runs its stages one after the other, so that each has one run.

    Raises:
        ScheduleError: the table is asynchronous: weights that change in a step cannot be dropped.
    """
    if LOAD in schedule.kinds:
        return schedule
    if schedule.is_window:
        raise ScheduleError(
            f"schedule {schedule.name!r} updates weights within a table, and weights that visit a device are dropped "
            "unchanged; use a synchronous schedule, such as breadth_first."
        )
    if not schedule.is_training:
        of_stages = (tuple(sorted(row, key=lambda action: action.stage)) for row in schedule.actions)
        schedule = replace(schedule, actions=tuple(of_stages))
    rows = []
    for worker, row in enumerate(schedule.actions):
        begins: defaultdict[int, list[Action]] = defaultdict(list)
        ends: defaultdict[int, list[Action]] = defaultdict(list)
        num_visits: defaultdict[int, int] = defaultdict(int)
        free_from: defaultdict[int, int] = defaultdict(int)
        for runs in _runs(schedule, worker, stay):
            for number, (stage, first, last) in enumerate(runs):
                visit = num_visits[stage]
                num_visits[stage] += 1
                # Beside the run before it, but after the stage's own last visit.
                begin = max(runs[number - 1][1], free_from[stage]) if number else first
                begins[begin].append(Action(LOAD, stage, step=visit))
                ends[last].append(Action(DROP, stage, step=visit))
                free_from[stage] = last + 1
        # A D before the L that takes its room.
        rows.append(tuple(entry for at, action in enumerate(row) for entry in (*begins[at], action, *ends[at])))
    return replace(schedule, actions=tuple(rows))


def _runs(schedule: Schedule, worker: int, stay: frozenset[int]) -> list[list[tuple[int, int, int]]]:
    """The runs (stage, first, last) of the stages that visit on each device of a worker, in order; first and last are
    places in the row. Between two runs of a stage there is another that visits."""
    row, placement = schedule.actions[worker], schedule.placement
    runs: dict[str | None, list[list[int]]] = {}
    graphs: defaultdict[int, int] = defaultdict(int)
    for at, action in enumerate(row):
        if action.micro_batch is None or action.stage in stay:
            continue
        stage = action.stage
        own = runs.setdefault(placement.device_of(stage, worker), [])
        open_run = next((run for run in reversed(own) if run[0] == stage), None)
        if open_run is not None and (open_run is own[-1] or graphs[stage]):
            open_run[2] = at
        else:
            own.append([stage, at, at])
        graphs[stage] += schedule.graphs_made(action)
    return [[(stage, first, last) for stage, first, last in own] for own in runs.values()]


@lru_cache(maxsize=8)
def most_loaded(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of stages whose weights are on one device at once, for each worker."""
    most = []
    for worker in range(len(schedule.actions)):
        # Each buffer has a first visit.
        firsts = (visit.load.stage for visit in visits(schedule, worker) if visit.after is None)
        buffers = Counter(schedule.placement.device_of(stage, worker) for stage in firsts)
        most.append(max(buffers.values(), default=0))
    return tuple(most)


def check_visits(schedule: Schedule, *, are_trained: bool = False) -> None:
    """Check that visits make room: not every device has the weights of all its stages at once.

    Args:
        schedule: a table with visits.
        are_trained: whether weights that visit are trained, so that gradients go to the host at the end of a visit.

    Raises:
        ScheduleError: every device has, or a stage would give its gradients to the host in parts, or has replicas that
            sum them; says what would help.
    """
    placement = schedule.placement
    if placement.is_shared:
        return
    if are_trained and placement.has_replicas:
        raise ScheduleError(
            "offload_weights is all and stages have replicas, whose gradients would be on the host when they are "
            "summed; use offload_weights frozen, or one replica."
        )
    for worker in range(len(schedule.actions)) if are_trained else ():
        backwards = Counter(visit.load.stage for visit in visits(schedule, worker) if visit.makes_gradients)
        if again := [stage for stage, count in backwards.items() if count > 1]:
            raise ScheduleError(
                f"offload_weights all with schedule {schedule.name!r}: the backwards of stage {again[0]} are in "
                f"{backwards[again[0]]} visits, and gradients leave the device at the end of one; use schedule "
                "'breadth_first', or offload_weights frozen."
            )
    visiting = visiting_stages(schedule)
    places = [(stage, worker) for stage, worker in placement.places if stage in visiting]
    stages = [
        Counter(placement.device_of(stage, worker) for stage, worker in places if worker == number)
        for number in range(placement.num_processes)
    ]
    own = tuple(max(of_devices.values(), default=0) for of_devices in stages)
    if most_loaded(schedule) == own:
        some = "" if len(visiting) == schedule.num_stages else " that visit"
        raise ScheduleError(
            f"offload_weights with schedule {schedule.name!r}: the weights of all stages of a device{some} would be "
            f"there at once ({max(own)} of {max(own)}); give at least three stages{some} for each device, recompute "
            "'stage' and schedule 'breadth_first', or leave offload_weights out."
        )
