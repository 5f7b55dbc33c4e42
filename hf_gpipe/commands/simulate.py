"""hf-gpipe simulate TABLE: the time, the bubble and the picture of a schedule's table, without a recipe."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_gpipe.commands.base import Parser, run_with_options
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.schedule import (
    SCHEDULES,
    V_SHAPED,
    Costs,
    Schedule,
    build,
    check_table,
    draw_png,
    draw_text,
    has_windows,
    placement_for,
    simulate,
)
from hf_gpipe.schedule.file import file_text, is_table_file, parse_table
from hf_gpipe.schedule.torch_csv import is_torch_file, read_torch, write_torch

DESCRIPTION = """\
Simulates a step of a table and draws it: of a file in the form of `plan --table`, of a CSV of torch.distributed's
pipelining, or of a schedule by its name. It needs no recipe and no model.

  hf-gpipe simulate mine.txt --f 10 --b 20 --w 10
  hf-gpipe simulate zb_h1 --stages 4 --micro-batches 8 --output zb.csv      writes it for torch
  hf-gpipe simulate zb.csv --picture zb.png
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_with_options(argv, _parser(), _simulate)


def _simulate(options: argparse.Namespace) -> int:
    table = _table(options)
    forward, backward, weight = options.f, options.b, options.b / 2 if options.w is None else options.w
    if min(forward, backward, weight, options.send) < 0 or weight > backward:
        raise UserError(
            f"--f {forward:g}, --b {backward:g}, --w {weight:g}, --send {options.send:g}: times are not negative, and "
            "W is a part of B."
        )
    costs = Costs(
        forward, backward, transfer_seconds=options.send, input_seconds=backward - weight, weight_seconds=weight
    )
    timeline = simulate(table, costs)
    print(draw_text(timeline, width=shutil.get_terminal_size((100, 24)).columns))
    if options.output is not None:
        if not is_table_file(options.output) and not is_torch_file(options.output):
            raise UserError(f"--output {options.output}: the name of a table ends in .txt, or for torch in .csv.")
        text = write_torch(table) if is_torch_file(options.output) else table.text()
        _written(options.output, text)
    if options.picture is not None:
        draw_png(options.picture, timeline)
    return 0


def _table(options: argparse.Namespace) -> Schedule:
    """The table that is asked for. Raises UserError for a name, a file or a table that is wrong."""
    name = options.table
    if is_table_file(name) or is_torch_file(name):
        try:
            text = file_text(name)
        except ScheduleError as error:
            raise UserError(f"cannot read the table {name}: {error}") from error
        if is_torch_file(name):
            return read_torch(text, os.path.basename(name))
        table = parse_table(text, name)
        check_table(table)
        return table
    if name not in (known := [name for name in SCHEDULES if not has_windows(name)]):
        raise UserError(f"{name!r} is neither a file (.txt, .csv) nor a schedule; known are {', '.join(known)}.")
    processes = options.processes or (options.stages // 2 if name in V_SHAPED else options.stages)
    placement = placement_for(name, options.stages, processes)
    return build(name, options.stages, options.micro_batches, placement, recompute="none")


def _written(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"{path} has the table", file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(DESCRIPTION, "simulate")
    parser.add_argument("table", metavar="TABLE", help="a file (.txt, or torch's .csv), or the name of a schedule")
    parser.add_argument("--f", type=float, default=1, help="time of a forward of a micro-batch in a stage (default: 1)")
    parser.add_argument("--b", type=float, default=2, help="time of a whole backward (default: 2)")
    parser.add_argument("--w", type=float, help="time of its part W, of the weights' gradients (default: half)")
    parser.add_argument("--send", type=float, default=0, help="time of a message between stages (default: 0)")
    parser.add_argument("--stages", type=int, default=4, help="K, for a name (default: 4)")
    parser.add_argument("--micro-batches", type=int, default=8, help="M, for a name (default: 8)")
    parser.add_argument("--processes", type=int, help="P, for a name (default: a stage each; two in a V-shaped one)")
    parser.add_argument("--output", metavar="FILE", help="write the table: .txt, or .csv for torch")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the step")
    return parser
