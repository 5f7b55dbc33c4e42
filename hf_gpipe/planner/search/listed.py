"""A table made for one plan: list scheduling with the plan's own seconds, bytes and messages, under its memory limit.

The builders' tables are made for equal stages, and recompute as seldom as their order allows. Where stages or cards
differ, messages take long, or memory has room for some graphs but not for all, a table in which each stage recomputes
single micro-batches and fills the time that is really free can be shorter (arXiv 2401.10241, section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from hf_gpipe.errors import ScheduleError
from hf_gpipe.planner.layout import Layout, costs_of_table
from hf_gpipe.planner.plan import Plan, best_of
from hf_gpipe.schedule import Action, Costs, Placement, Schedule, check_table, recompute_under
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, RECOMPUTE, UPDATE, WEIGHT, Held
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.zero_bubble import whole_backwards
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import DecidedConfig, PipelineConfig

TABLE_FILE = "auto.txt"
"""The name by which a configuration names the table that was made for its plan. There is no such file."""

#: The most work of the search for a table: in actions that are tried, a few seconds, and in tables that are tried.
_EFFORT, _TABLES = 1_000_000, 1_500
#: The length of a step, as a multiple of its bound, up to which it is short enough.
_ENOUGH = 1.01
#: The most tables that are made, and the share of the last room that the next table gets where a table does not fit:
#: messages that arrive early take room that the search does not count.
_MOST_TRIES, _LESS = 3, 0.97


#: The kinds that it lists.
_LISTED = FORWARD, RECOMPUTE, BACKWARD, INPUT, WEIGHT, UPDATE


def with_table(plan: Plan, asked: PipelineConfig) -> Plan:
    """The better of a plan and the plan with a table that is made for it, where the configuration allows such tables.

    Args:
        plan: the best plan of the named schedules.
        asked: the configuration that it was planned for. A table is made where its schedule is "auto"; its
            `recompute` says whether the table may recompute micro-batches ("auto"), blocks only or nothing.
    """
    settings, table = plan.settings, plan.timeline.schedule
    # A compiled block has one backward. In one process no table is shorter than another.
    is_open = asked.schedule == AUTO and asked.recompute in (AUTO, "none", "block") and asked.compiled.backend is None
    is_whole = table.num_micro_batches == plan.planner.inputs.accumulation * settings.num_micro_batches
    placement = table.placement
    is_given = settings.placement is not None
    is_plain = placement.num_processes > 1 and placement.group_size == 1 and not (placement.has_replicas or is_given)
    # Kinds of modes have no place in it, but for those in place of which it recomputes.
    is_plain = is_plain and all(kind in _LISTED or kind.recompute is not None for kind in table.kinds)
    if not (is_open and is_whole and is_plain and plan.fits):
        return plan
    if asked.recompute == AUTO:
        settings = settings.replace(recompute="none")  # by the table alone
    layout = plan.planner.layout(settings, table)
    costs = costs_of_table(layout)
    if plan.step_seconds <= _ENOUGH * _bound(costs, table):
        return plan
    return best_of(plan, *_listed_plans(plan, layout, costs, recomputes=asked.recompute == AUTO))


def _bound(costs: Costs, table: Schedule) -> float:
    """The least seconds of a step: some process waits for its first forward, and then does all its work."""
    placement, count = table.placement, table.num_micro_batches
    forward, messages = each_stage(costs.forward_seconds), _messages(costs, placement)
    work = [*zip(forward, each_stage(costs.input_seconds), each_stage(costs.weight_seconds), strict=True)]
    update = each_stage(costs.update_seconds)
    return max(
        sum(forward[: own[0]]) + sum(messages[: own[0]]) + sum(count * sum(work[s]) + update[s] for s in own)
        for own in map(placement.stages_of, range(placement.num_processes))
    )


def _listed_plans(plan: Plan, layout: Layout, costs: Costs, *, recomputes: bool) -> Iterator[Plan]:
    """Yield the plan with tables for the memory that there is, or for several amounts where no limit is known."""
    settings, table = layout.settings, layout.table
    work = _work(layout, costs, recomputes=recomputes)
    size, count = table.placement.num_processes, table.num_micro_batches
    effort = min(_EFFORT, _TABLES * 3 * table.num_stages * min(count, 2 * size))
    own = [sum(work.held[stage] for stage in table.placement.stages_of(process)) for process in range(size)]
    if plan.planner.memory_bytes is None:
        for most in sorted({min(n, count) for n in (size, 2 * size - 1, count)}):
            rows = best_listed(table.placement, count, work, [most * held for held in own], effort=effort // 3).orders
            yield _planned(plan, settings, rows)
        return
    rooms = [min(_room(plan, process), count * held) for process, held in enumerate(own)]
    for _ in range(_MOST_TRIES):
        try:
            orders = best_listed(table.placement, count, work, rooms, effort=effort).orders
        except ScheduleError:  # there is no room for one micro-batch
            return
        planned = _planned(plan, settings, orders)
        yield planned
        if planned.fits:
            return
        lacks = [min(0, _spare(planned, process)) for process in range(size)]
        rooms = [max(held, min(room + lack, _LESS * room)) for held, room, lack in zip(own, rooms, lacks, strict=True)]


def _work(layout: Layout, costs: Costs, *, recomputes: bool) -> Work:
    sizes = [layout.sums.bytes_of(stage).sizes for stage in layout.stages]
    received, graph, deferred = ([own[held] for own in sizes] for held in (Held.INPUT, Held.GRAPH, Held.DEFERRED))
    held = [of_input + of_graph for of_input, of_graph in zip(received, graph, strict=True)]
    return Work(
        each_stage(costs.forward_seconds),
        each_stage(costs.input_seconds),
        each_stage(costs.weight_seconds),
        held,
        [*map(min, deferred, held)],
        _messages(costs, layout.table.placement),
        each_stage(costs.recompute_seconds) if recomputes else None,
        received,
    )


def _messages(costs: Costs, placement: Placement) -> list[float]:
    """The seconds of a message over each boundary, which has a single edge without replicas."""
    of_edges = cast(Mapping[tuple[int, int, int], float], costs.transfer_seconds)
    return [of_edges[edge] for edge in sorted(placement.edges)]


def _room(plan: Plan, process: int) -> float:
    """The bytes that a process has for micro-batches: what they take at its peak, and what is free then."""
    memory, table = plan.memory[process], plan.timeline.schedule
    ids = table.num_micro_batches * plan.costs.micro_batch_bytes
    return memory.activations + memory.logits + memory.boundaries - ids + _spare(plan, process)


def _spare(plan: Plan, process: int) -> int:
    """The bytes that are free at the peak. A negative number is the bytes that lack."""
    limit = plan.planner.limit_of(process)
    assert limit is not None
    spare = limit - plan.memory[process].total
    return int(spare / (1 + plan.planner.device.reserved_share)) - (spare < 0)


def _planned(plan: Plan, settings: DecidedConfig, orders: Sequence[Sequence[Action]]) -> Plan:
    """The plan with a table of these orders."""
    before = plan.timeline.schedule
    placement = before.placement
    rows = [
        (*whole_backwards(order, process, placement), *(Action(UPDATE, s) for s in placement.stages_of(process)))
        for process, order in enumerate(orders)
    ]
    table = Schedule(TABLE_FILE, before.num_stages, before.num_micro_batches, placement, tuple(rows))
    check_table(table)
    return with_table_file(plan, settings, table)


def each_stage(seconds: object) -> Sequence[float]:
    """The planner's costs of an action whose rows are whole: one value for each stage."""
    return cast(Sequence[float], seconds)


def with_table_file(plan: Plan, settings: DecidedConfig, table: Schedule, made_by: str = AUTO) -> Plan:
    """Plan these settings with a valid table, named `TABLE_FILE`, in place of the schedule; a schedule `made_by` in a
    configuration lets the planner make the table."""
    planner = copy.copy(plan.planner)
    planner.made_by = made_by
    planner.inputs = replace(planner.inputs, tables={TABLE_FILE: table})
    recompute = recompute_under(table, "block" if settings.recompute == "block" else "stage")
    return planner.plan(settings.replace(schedule=TABLE_FILE, recompute=recompute))
