"""A plan as a picture: the memory of each process, item by item, above the timeline of the predicted step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from hf_gpipe.errors import UserError
from hf_gpipe.planner.memory import MemoryEstimate
from hf_gpipe.planner.plan import Plan
from hf_gpipe.schedule.draw import figure as timeline_figure

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_GIB = 1 << 30


def draw_plan(path: str | Path, plan: Plan) -> None:
    """Write the picture of a plan.

    Raises:
        UserError: the path is no .png, or cannot be written.
    """
    # The import is here since whoever draws nothing should not wait for matplotlib.
    import numpy as np
    from matplotlib.image import imsave

    if Path(path).suffix.lower() != ".png":
        raise UserError(f"cannot draw {path}: the picture of a plan is a PNG; give it a name that ends in .png")
    timeline = timeline_figure([plan.timeline], ["predicted step"])
    parts = [_pixels(memory_figure(plan, timeline.get_figwidth())), _pixels(timeline)]
    # A figure rounds its width to whole pixels.
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0)), constant_values=255) for part in parts]
    try:
        imsave(path, np.concatenate(padded))
    except OSError as error:
        raise UserError(f"cannot write the picture {path}: {error.strerror or error}") from error


def memory_figure(plan: Plan, width_inches: float) -> Figure:
    """Draw a bar for each process, with its items side by side, and a line at the limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    processes = plan.processes
    picture = Figure(figsize=(width_inches, 1.6 + 0.32 * len(processes)), dpi=150, layout="constrained")
    FigureCanvasAgg(picture)
    panel = picture.subplots()
    left = [0.0] * len(processes)
    rows = range(len(processes))
    for item in fields(MemoryEstimate):
        widths = [getattr(process.memory, item.name) / _GIB for process in processes]
        look = {"color": item.metadata["colour"], "label": item.name.replace("_", " ")}
        panel.barh(rows, widths, left=left, height=0.84, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if (limit := plan.planner.memory_bytes) is not None:
        limits = limit if isinstance(limit, tuple) else (limit,) * len(processes)
        at = [size / _GIB for size in limits]
        starts, ends = [row - 0.5 for row in rows], [row + 0.5 for row in rows]
        panel.vlines(at, starts, ends, color="black", linestyle="--", linewidth=1, label="limit")
    panel.set_ylim(len(processes) - 0.5, -0.5)
    panel.set_yticks(rows, labels=[f"process {process.number}" for process in processes])
    panel.tick_params(labelsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("GiB at the peak of a step")
    picture.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    return picture


def _pixels(picture: Figure) -> np.ndarray:
    """The pixels of a figure, (height, width, 4)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = picture.canvas
    assert isinstance(canvas, FigureCanvasAgg), "the figures here are drawn by Agg"
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())
