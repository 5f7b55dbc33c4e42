"""Pipeline schedules as tables, which say what each process does in one step, and in which order.

The package is pure Python and does not import torch.

`build` makes a table, `read_table` reads a table from a file, and `Schedule` holds it. `check_table` checks that a
table can be run, and `simulate` predicts its time. `draw_text`, `draw_png`, `write_trace` and `breakdown` show it. The
executor runs it.
"""

from collections.abc import Sequence

from hf_gpipe.registry import functions_of_modes, parts_of_modes
from hf_gpipe.schedule.actions import Action as Action
from hf_gpipe.schedule.breakdown import Breakdown as Breakdown
from hf_gpipe.schedule.breakdown import Parts as Parts
from hf_gpipe.schedule.breakdown import breakdown as breakdown
from hf_gpipe.schedule.builders import IN_TURN as IN_TURN
from hf_gpipe.schedule.builders import RECOMPUTE_MODES as RECOMPUTE_MODES
from hf_gpipe.schedule.builders import SPLIT_SCHEDULES as SPLIT_SCHEDULES
from hf_gpipe.schedule.builders import V_SHAPED as V_SHAPED
from hf_gpipe.schedule.builders import build as build
from hf_gpipe.schedule.builders import check_once as check_once
from hf_gpipe.schedule.builders import placement_for as placement_for
from hf_gpipe.schedule.draw import draw_png as draw_png
from hf_gpipe.schedule.draw import draw_text as draw_text
from hf_gpipe.schedule.file import TABLE_SUFFIX as TABLE_SUFFIX
from hf_gpipe.schedule.file import is_table_file as is_table_file
from hf_gpipe.schedule.file import read_table as read_table
from hf_gpipe.schedule.file import recompute_under as recompute_under
from hf_gpipe.schedule.kinds import ActionKind as ActionKind
from hf_gpipe.schedule.named import LONGEST_WINDOW as LONGEST_WINDOW
from hf_gpipe.schedule.named import SCHEDULES as SCHEDULES
from hf_gpipe.schedule.named import NamedSchedule as NamedSchedule
from hf_gpipe.schedule.named import has_windows as has_windows
from hf_gpipe.schedule.named import training_schedules as training_schedules
from hf_gpipe.schedule.named import window_schedules as window_schedules
from hf_gpipe.schedule.placement import Placement as Placement
from hf_gpipe.schedule.placement import replicas_of as replicas_of
from hf_gpipe.schedule.simulate import Costs as Costs
from hf_gpipe.schedule.simulate import Span as Span
from hf_gpipe.schedule.simulate import Timeline as Timeline
from hf_gpipe.schedule.simulate import seconds_of_steps as seconds_of_steps
from hf_gpipe.schedule.simulate import simulate as simulate
from hf_gpipe.schedule.table import Schedule as Schedule
from hf_gpipe.schedule.trace import write_trace as write_trace
from hf_gpipe.schedule.validate import check_table as check_table
from hf_gpipe.schedule.versions import num_stashes as num_stashes
from hf_gpipe.schedule.versions import staleness as staleness


def with_modes(table: Schedule, recompute: Sequence[str | int]) -> Schedule:
    """The table with the actions of the modes that are in use.

    Args:
        recompute: the entry of each stage.
    """
    for apply in functions_of_modes("table", "apply"):
        table = apply(table, recompute)
    return table


# Their kinds of actions and their schedules are known to every table.
parts_of_modes("table")
