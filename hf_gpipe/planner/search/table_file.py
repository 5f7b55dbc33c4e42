"""A plan with a table that was made for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from hf_gpipe.planner.plan import Plan
from hf_gpipe.schedule import Schedule, recompute_under
from hf_gpipe.settings.pipeline import DecidedConfig

TABLE_FILE = "auto.txt"
"""The name by which a configuration names the table that was made for its plan. There is no such file."""


def each_stage(seconds: object) -> Sequence[float]:
    """The planner's costs of an action whose rows are whole: one value for each stage."""
    return cast(Sequence[float], seconds)


def with_table_file(plan: Plan, settings: DecidedConfig, table: Schedule) -> Plan:
    """Plan these settings with a valid table, named `TABLE_FILE`, in place of the schedule."""
    planner = copy.copy(plan.planner)
    planner.inputs = replace(planner.inputs, tables={TABLE_FILE: table})
    recompute = recompute_under(table, "block" if settings.recompute == "block" else "stage")
    return planner.plan(settings.replace(schedule=TABLE_FILE, recompute=recompute))
