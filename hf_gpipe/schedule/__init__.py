"""Pipeline schedules as tables, which say what each process does in one step, and in which order.

The package is pure Python and does not import torch.

`build` makes a table, `read_table` reads a table from a file, and `Schedule` holds it. `check_table` checks that a
table can be run, and `simulate` predicts its time. `draw_text`, `draw_png`, `write_trace` and `breakdown` show it. The
executor runs it.
"""

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES, LONGEST_WINDOW
from hf_gpipe.schedule.breakdown import Breakdown, Parts, breakdown
from hf_gpipe.schedule.builders import (
    DEALT,
    DIVIDED_HEAD,
    IN_TURN,
    RECOMPUTE_MODES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    V_SHAPED,
    build,
    check_once,
    placement_for,
)
from hf_gpipe.schedule.draw import draw_png, draw_text
from hf_gpipe.schedule.file import TABLE_SUFFIX, is_table_file, read_table, recompute_under
from hf_gpipe.schedule.kinds import ActionKind
from hf_gpipe.schedule.offload import with_offloads
from hf_gpipe.schedule.placement import Placement, replicas_of
from hf_gpipe.schedule.simulate import Costs, Span, Timeline, seconds_of_steps, simulate
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.trace import write_trace
from hf_gpipe.schedule.validate import check_table
from hf_gpipe.schedule.versions import num_stashes, staleness

__all__ = [
    "ASYNCHRONOUS_SCHEDULES",
    "DEALT",
    "DIVIDED_HEAD",
    "IN_TURN",
    "LONGEST_WINDOW",
    "RECOMPUTE_MODES",
    "SCHEDULES",
    "SPLIT_SCHEDULES",
    "TABLE_SUFFIX",
    "V_SHAPED",
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
    "check_once",
    "check_table",
    "draw_png",
    "draw_text",
    "is_table_file",
    "num_stashes",
    "placement_for",
    "read_table",
    "recompute_under",
    "replicas_of",
    "seconds_of_steps",
    "simulate",
    "staleness",
    "with_offloads",
    "write_trace",
]
