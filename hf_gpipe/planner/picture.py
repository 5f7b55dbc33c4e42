"""A plan as a picture or a page: the memory of each process above the timeline of the predicted step."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hf_gpipe.errors import UserError
from hf_gpipe.planner.memory import MemoryEstimate
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.report import report, verdict
from hf_gpipe.schedule.draw import BAR_HEIGHT, figure, row_name, svg_of, titled
from hf_gpipe.text import html_page, preformatted, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1 << 30
#: The share of the longest bar below which an item is not in the legend.
_SMALL = 0.01


def draw_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan as a picture (.png), or as a page with the verdict, the picture and the whole report (.html).

    Raises:
        UserError: another suffix, or a file that cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".html"):
        raise UserError(
            f"cannot draw {path}: the picture of a plan is a PNG or a page; give it a name that ends in .png or .html"
        )
    try:
        if suffix == ".png":
            plan_figure(plan).savefig(path)
        else:
            # It needs no other file.
            text = preformatted(report(plan, width=100))
            parts = [("Memory and time", svg_of(plan_figure(plan))), ("The plan in full", text)]
            page = html_page("A plan of hf_gpipe", verdict(plan), parts, is_good=plan.fits)
            Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the picture {path}: {error.strerror or error}") from error


def plan_figure(plan: Plan) -> Figure:
    """Draw a bar for each process, with its items side by side and a line at the limit, above the predicted step."""
    title = f"One step of {plan.settings.schedule}"
    above = 1.6 + 0.34 * len(plan.processes), partial(_draw_memory, plan)
    return figure([plan.timeline], [title], above=above, width=8.0)


def _draw_memory(plan: Plan, panel: Axes) -> None:
    processes, placement = plan.processes, plan.timeline.schedule.placement
    rows, left = range(len(processes)), [0.0] * len(processes)
    for item in fields(MemoryEstimate):
        widths = [getattr(process.memory, item.name) / _GIB for process in processes]
        is_small = max(widths) < _SMALL * plan.peak_bytes / _GIB
        label = {} if is_small else {"label": item.metadata["words"]}
        panel.barh(rows, widths, left=left, height=BAR_HEIGHT, color=item.metadata["colour"], **label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    limits = [plan.planner.limit_of(process.number) for process in processes]
    for row, limit in enumerate(limits):
        if limit is not None:
            label = {"label": f"limit, {size_text(limit)}"} if row == 0 else {}
            panel.vlines(limit / _GIB, row - 0.5, row + 0.5, color="black", linestyle="--", linewidth=1.2, **label)
    stages = [process.stages[0] if len(process.stages) == 1 else None for process in processes]
    # The rows of both panels have the same names where a process has one stage.
    names = [row_name(placement, stage, process.number) for stage, process in zip(stages, processes, strict=True)]
    panel.set_ylim(len(processes) - 0.5, -0.5)
    panel.set_yticks(rows, labels=names)
    panel.set_xlabel("GiB")
    handles, _ = panel.get_legend_handles_labels()
    titled(panel, f"Memory of each process at its peak: {size_text(plan.peak_bytes)} at most", handles, columns=2)
