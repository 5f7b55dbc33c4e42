"""Schedules as tables: what each process does, in which order, in one step. Pure Python, without torch.

`build` writes a table, `Schedule` holds and validates it, `simulate` predicts its time and memory, `draw_text`,
`draw_png`, `write_trace` and `breakdown` show it. The executor runs the same table.
"""

from hf_gpipe.schedule.actions import Action, ActionKind, Placement
from hf_gpipe.schedule.breakdown import Breakdown, Parts, breakdown
from hf_gpipe.schedule.builders import RECOMPUTE_MODES, SCHEDULES, build, placement_for
from hf_gpipe.schedule.draw import draw_png, draw_text
from hf_gpipe.schedule.simulate import Costs, Span, Timeline, simulate
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.trace import write_trace

__all__ = [
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "Breakdown",
    "Costs",
    "Parts",
    "Placement",
    "Schedule",
    "Span",
    "Timeline",
    "breakdown",
    "build",
    "draw_png",
    "draw_text",
    "placement_for",
    "simulate",
    "write_trace",
]
