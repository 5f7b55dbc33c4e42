"""Tables in the CSV of torch.distributed.pipelining: a line for each process, with the actions F, B, I and W as 2F0.

torch's file says nothing of updates, reductions and recomputations. Updates are added when it is read; messages that a
file names are left out, because they follow from the table.
"""

from __future__ import annotations

import re

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, KINDS, REDUCE, UPDATE, WEIGHT
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.updates import with_updates
from hf_gpipe.schedule.validate import check_table

_SUFFIX = ".csv"
_ACTION = re.compile(rf"(\d+)([{FORWARD}{BACKWARD}{INPUT}{WEIGHT}])(\d+)")
#: What torch sends and gathers for an action.
_MESSAGE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB])\d*")


def is_torch_file(path: str) -> bool:
    """Whether a path is the name of such a file."""
    return path.endswith(_SUFFIX)


def read_torch(text: str, name: str) -> Schedule:
    """The table of a file's text.

    Raises:
        ScheduleError: the line and the word that is no action, or what the table lacks.
    """
    orders: list[list[Action]] = []
    homes: dict[int, int] = {}
    for process, line in enumerate(text.splitlines()):
        words = [word.strip().strip('"') for word in line.split(",")]
        orders.append([])
        for word in filter(None, words):
            if found := _ACTION.fullmatch(word):
                stage = int(found[1])
                if homes.setdefault(stage, process) != process:
                    raise ScheduleError(
                        f"{name}, line {process + 1}: stage {stage} is in line {homes[stage] + 1} too; torch's CSV has "
                        "a stage on one process."
                    )
                orders[-1].append(Action(KINDS[found[2]], stage, int(found[3])))
            elif not _MESSAGE.fullmatch(word):
                raise ScheduleError(
                    f"{name}, line {process + 1}: {word!r} is no action of torch's CSV; write F, B, I or W between a "
                    "stage and a micro-batch, as 2F0."
                )
    if not homes or sorted(homes) != list(range(len(homes))):
        raise ScheduleError(f"{name} has the stages {sorted(homes)}; stages have the numbers from 0 without a gap.")
    placement = Placement([[homes[stage]] for stage in range(len(homes))])
    count = 1 + max(action.micro_batch or 0 for order in orders for action in order)
    rows = tuple(map(tuple, with_updates(orders, placement)))
    table = Schedule(name, len(homes), count, placement, rows)
    check_table(table)
    return table


def write_torch(table: Schedule) -> str:
    """The text of a table in torch's CSV.

    Raises:
        ScheduleError: the table has an action, or replicas, which torch's file cannot have.
    """
    kinds = {action.kind for row in table.actions for action in row}
    other = kinds - {FORWARD, BACKWARD, INPUT, WEIGHT, UPDATE, REDUCE}
    if other or table.placement.has_replicas or table.is_window:
        what = ", ".join(sorted(map(str, other))) or "replicas, or several steps"
        raise ScheduleError(f"torch's CSV has F, B, I and W alone, and the table has {what}; use recompute none.")
    rows = [[str(action) for action in row if action.kind not in (UPDATE, REDUCE)] for row in table.actions]
    return "".join(f"{','.join(row)}\n" for row in rows)
