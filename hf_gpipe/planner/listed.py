"""A table made for one plan: list scheduling with the plan's own seconds, bytes and messages, under its memory limit.

The builders' tables of zero bubble are made for equal stages. Where stages differ, or messages take long, a table in
which the gradients of weights fill the time that is really free can be shorter (arXiv 2401.10241, section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import cast

from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.planner.plan import Plan, stage_layers
from hf_gpipe.schedule import Action, Schedule
from hf_gpipe.schedule.kinds import UPDATE
from hf_gpipe.schedule.list_scheduling import Work, best_listed

#: Under which such a table is known: the file into which it is to be written.
TABLE_FILE = "listed.txt"


def listed_plan(plan: Plan) -> Plan:
    """The best of a plan and the same with tables that list scheduling finds.

    Each process may hold n micro-batches in all its stages; several n are tried, and the planner says what fits.

    Raises:
        UserError: the plan has replicas, recomputes whole stages, or accumulates several mini-batches.
    """
    planner, settings, table = plan.planner, plan.settings, plan.timeline.schedule
    placement, count = table.placement, table.num_micro_batches
    if settings.recompute not in ("none", "block") or placement.has_replicas:
        raise UserError(
            f"--listed: the plan has recompute {settings.recompute!r} and replicas {settings.replicas!r}; lists are "
            "made for stages without replicas and for recompute none or block: set these two, or leave --listed out."
        )
    if planner.inputs.accumulation > 1:
        raise UserError("--listed: training.gradient_accumulation_steps must be 1; raise num_micro_batches instead.")
    stages, sums = stage_layers(settings), planner.sums(settings.num_micro_batches)
    costs = planner.table_costs(settings, table)
    kept = [sums.graphs[stage.inner].kept_bytes(stage.start, stage.stop) for stage in stages]
    deferred = [
        min(sums.deferred_bytes(stage.start, stage.stop), most) for stage, most in zip(stages, kept, strict=True)
    ]
    # Without replicas each boundary has one edge.
    messages = cast(Mapping[tuple[int, int, int], float], costs.transfer_seconds)
    work = Work(
        cast(Sequence[float], costs.forward_seconds),
        cast(Sequence[float], costs.input_seconds),
        cast(Sequence[float], costs.weight_seconds),
        kept,
        deferred,
        [messages[edge] for edge in sorted(placement.edges)],
    )
    size = placement.num_processes
    own = [sum(kept[stage] for stage in placement.stages_of(process)) for process in range(size)]
    plans = [plan]
    for most in sorted({min(n, count) for n in (size // 2 + 1, size, 3 * size // 2, 2 * size - 1, count)}):
        orders = best_listed(placement, count, work, [most * size for size in own]).orders
        rows = [
            (*order, *(Action(UPDATE, stage) for stage in placement.stages_of(process)))
            for process, order in enumerate(orders)
        ]
        listed = Schedule(TABLE_FILE, placement.num_stages, count, placement, tuple(rows))
        other = copy.copy(planner)
        other.inputs = replace(planner.inputs, tables={TABLE_FILE: listed})
        try:
            plans.append(other.plan(replace(settings, schedule=TABLE_FILE)))
        except ScheduleError:
            continue
    return min(plans, key=attrgetter("sort_key"))
