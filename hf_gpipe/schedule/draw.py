"""A timeline as text, and as a picture.

Text, for terminals and docstrings: one row per stage, or per replica of a stage, from left to right in time, as in
figure 2c of GPipe (arXiv 1811.06965). Picture (PNG, SVG): the same rows in seconds, and several timelines below each
other on one scale, for example the predicted and the measured one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.kinds import KINDS, Resource
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.simulate import Seconds, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IDLE_COLOUR = "#dcdcdc"
_ELSEWHERE_COLOUR = "#f6f6f6"
BAR_HEIGHT = 0.84
_LABEL_POINTS = 7.0
#: The share of a timeline from which a bar can be seen.
_VISIBLE = 5e-4
_SUFFIXES = (".png", ".svg")


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """The timeline in ASCII, one row per stage or replica of it and a last line with the time and the bubble.

    A column is as long as the shortest action (reductions and updates aside) and shows the action that fills most of
    it: "F0" where it starts, "--" where it goes on, ".." where the stage is idle. Where this is wider than `width`
    characters, a column is a single letter, the action's kind, and as much longer as needed. Updates on the host are
    shown where the device is idle.
    """
    busy = [span for span in timeline.spans if span.busy > 0]
    column_seconds = min((span.busy for span in busy if not span.action.kind.is_of_mini_batch), default=0)
    # Sums of floats are a little off: a millionth of a column is none.
    num_columns = math.ceil(timeline.total_seconds / column_seconds - 1e-6) if column_seconds else 0
    placement = timeline.schedule.placement
    names = [name_in_text(placement, *row) for row in placement.rows]
    margin = max(map(len, names)) + 2
    cell = max((len(_label(placement, span)) for span in busy), default=0)
    labelled = margin + num_columns * (cell + 1) - 1 <= width
    if not labelled and num_columns > width - margin:
        num_columns = max(1, width - margin)
        column_seconds = timeline.total_seconds / num_columns
    lines = []
    for row, name in zip(placement.rows, names, strict=True):
        own = [span for span in busy if _row(placement, span) == row]
        columns, on_host = (
            _columns([span for span in own if _is_on_host(span) == is_on_host], num_columns, column_seconds)
            for is_on_host in (False, True)
        )
        columns = [span or host_span for span, host_span in zip(columns, on_host, strict=True)]
        if labelled:
            text = " ".join(_cell(placement, columns, index, cell) for index in range(num_columns))
        else:
            text = "".join("." if span is None else span.action.kind for span in columns)
        lines.append(name.ljust(margin) + text)
    lines.append(f"total {_seconds(timeline)}, bubble {float(timeline.bubble):.1%}")
    return "\n".join(line.rstrip() for line in lines)


def _is_on_host(span: Span) -> bool:
    return span.action.kind.resource is Resource.HOST


def _label(placement: Placement, span: Span) -> str:
    return str(span.action) if placement.is_shared else span.action.label


def _cell(placement: Placement, columns: Sequence[Span | None], index: int, width: int) -> str:
    span = columns[index]
    if span is None:
        return "." * width
    if index > 0 and columns[index - 1] is span:
        return "-" * width
    return _label(placement, span).ljust(width)


def _columns(spans: Sequence[Span], num_columns: int, column_seconds: Seconds) -> list[Span | None]:
    """The span that fills most of each column, or None where the stage is mostly idle."""
    filled: list[Span | None] = []
    first = 0
    for column in range(num_columns):
        left, right = column * column_seconds, (column + 1) * column_seconds
        while first < len(spans) and spans[first].end <= left:
            first += 1
        best, most, busy = None, 0.0, 0.0
        for span in spans[first:]:
            if span.start >= right:
                break
            overlap = float(min(span.end, right) - max(span.start + span.waiting, left))
            busy += max(overlap, 0.0)
            # The device's work hides half as much of what runs beside it.
            shown = overlap if span.action.kind.resource is Resource.COMPUTE else overlap / 2
            if shown > most:
                best, most = span, shown
        filled.append(best if busy >= float(column_seconds) / 2 else None)
    return filled


def draw_png(path: str | Path, *timelines: Timeline, titles: Sequence[str] | None = None) -> None:
    """Draws timelines below each other, on one scale of seconds, into a PNG or (by the suffix) an SVG file.

    A row is a stage, or a replica of it, a bar an action, with the number of its micro-batch where there is room. Grey
    is idle: the process of the stage waits. Nearly white is a stage at rest while its process runs another of its
    stages.

    Args:
        path: ends in .png or .svg.
        titles: what each timeline is, for example ("predicted", "measured"); None: their schedules, K and M.

    Raises:
        ScheduleError: another suffix, no timeline, or not one title for each.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ScheduleError(f"cannot draw {path}: the suffix {path.suffix!r} is not one of {', '.join(_SUFFIXES)}.")
    figure(timelines, checked_titles(path, timelines, titles)).savefig(path)


def figure(
    timelines: Sequence[Timeline],
    titles: Sequence[str],
    *,
    above: tuple[float, Callable[[Axes], None]] | None = None,
    width: float | None = None,
) -> Figure:
    """The picture of `draw_png` as a matplotlib figure, which belongs to the caller alone (pyplot never sees it).

    Args:
        timelines: drawn below each other.
        titles: what each timeline is; its seconds and its bubble come after it.
        above: the height in inches of another panel above them, and what draws it.
        width: in inches; None: enough for the numbers of the micro-batches.
    """
    # Imported here, because loading matplotlib takes time and few callers draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_slots = max(3 * (t.schedule.num_micro_batches + t.schedule.num_stages) for t in timelines)
    heights = [0.9 + 0.34 * len(timeline.schedule.placement.rows) for timeline in timelines]
    heights = [*(above[:1] if above else ()), heights[0] + 0.2, *heights[1:]]
    size = width or min(20.0, max(8.0, 0.21 * num_slots)), 0.4 + sum(heights)
    picture = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(picture)
    panels = list(picture.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0])
    if above:
        above[1](panels.pop(0))
    # What is too short to be seen has no entry in the legend.
    kinds = {
        span.action.kind
        for timeline in timelines
        for span in timeline.spans
        if span.busy > _VISIBLE * timeline.total_seconds
    }
    entries = [Patch(facecolor=kind.colour, label=kind.word) for kind in KINDS.values() if kind in kinds]
    entries.append(Patch(facecolor=_IDLE_COLOUR, label="idle"))
    if any(t.schedule.placement.num_processes < len(t.schedule.placement.rows) for t in timelines):
        entries.append(Patch(facecolor=_ELSEWHERE_COLOUR, edgecolor=_IDLE_COLOUR, label="process at another stage"))
    longest = max(float(timeline.total_seconds) for timeline in timelines)
    for number, (panel, timeline, title) in enumerate(zip(panels, timelines, titles, strict=True)):
        panel.set_xlim(0, longest or 1)
        panel.tick_params(labelbottom=panel is panels[-1])
        _draw_panel(panel, timeline)
        words = f"{title}: total {_seconds(timeline)}, bubble {float(timeline.bubble):.1%}"
        titled(panel, words, entries if number == 0 else [], columns=5)
    panels[-1].set_xlabel("seconds")
    # The layout is computed before the labels, because whether a label fits depends on the width of its bar on paper.
    picture.draw_without_rendering()
    picture.set_layout_engine("none")  # it is computed already, and takes a third of the time
    for panel, timeline in zip(panels, timelines, strict=True):
        _label_bars(panel, timeline, panel.bbox.width * 72 / picture.dpi / (longest or 1))
    return picture


def titled(panel: Axes, title: str, entries: Sequence[Artist], columns: int) -> None:
    """Give a panel its title, and below the title a legend in so many columns."""
    rows = math.ceil(len(entries) / columns)
    panel.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=6 + 17 * rows)
    if entries:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "borderpad": 0.2, "borderaxespad": 0.1}
        panel.legend(handles=entries, ncols=columns, frameon=False, fontsize=10, handlelength=1.4, **place)
    panel.tick_params(axis="y", length=0)
    panel.tick_params(labelsize=10)
    panel.spines[["top", "right", "left"]].set_visible(False)


def svg_of(picture: Figure) -> str:
    """A figure as an element of a page."""
    text = io.StringIO()
    picture.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_panel(panel: Axes, timeline: Timeline) -> None:
    placement, total = timeline.schedule.placement, float(timeline.total_seconds)
    for row, (stage, process) in enumerate(placement.rows):
        bottom = row - BAR_HEIGHT / 2
        # The row is idle until something covers it: pale for the other stages of its process, then its own bars.
        panel.broken_barh([(0, total)], (bottom, BAR_HEIGHT), facecolor=_IDLE_COLOUR)
        others = [
            span
            for span in timeline.spans
            if span.process == process and span.action.kind.resource is Resource.COMPUTE
            if stage not in (None, span.action.stage)
        ]
        panel.broken_barh([_bar(span) for span in others], (bottom, BAR_HEIGHT), facecolor=_ELSEWHERE_COLOUR)
        # What runs beside the device's work is drawn below it.
        for kind in sorted(KINDS.values(), key=lambda kind: kind.resource is Resource.COMPUTE):
            own = [
                span
                for span in timeline.spans
                if _row(placement, span) == (stage, process) and span.action.kind == kind
            ]
            panel.broken_barh(
                [_bar(span) for span in own],
                # Below the actions beside which it runs.
                (bottom + 0.75 * BAR_HEIGHT, 0.25 * BAR_HEIGHT)
                if kind.resource is Resource.HOST
                else (bottom, BAR_HEIGHT),
                facecolor=kind.colour,
                edgecolor="white",
                linewidth=0.4,
            )
    names = [row_name(placement, *row) for row in placement.rows]
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), labels=names)


def _bar(span: Span) -> tuple[float, float]:
    return float(span.start + span.waiting), float(span.busy)


def _row(placement: Placement, span: Span) -> tuple[int | None, int]:
    return placement.row_of(span.action.stage, span.process)


def name_in_text(placement: Placement, stage: int | None, process: int) -> str:
    """A stage, and where any has replicas also the process; without a stage the process."""
    if stage is None:
        return f"process {process}"
    return f"stage {stage} (process {process})" if placement.has_replicas else f"stage {stage}"


def row_name(placement: Placement, stage: int | None, process: int) -> str:
    """A stage, with its process where that may have another number; without a stage the process."""
    if stage is None or placement.num_processes == placement.num_stages:
        return name_in_text(placement, stage, process)
    return f"stage {stage} (process {process})"


def _label_bars(panel: Axes, timeline: Timeline, points_per_second: float) -> None:
    """Writes micro-batches into bars, for each row and kind of action whose typical bar has room for its longest."""
    placement = timeline.schedule.placement
    number = {where: row for row, where in enumerate(placement.rows)}
    rows: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        if _is_on_host(span):
            continue
        rows.setdefault((number[_row(placement, span)], span.action.kind), []).append(span)
    for (row, _), spans in rows.items():
        if median(_bar(span)[1] for span in spans) * points_per_second < max(
            _label_width(placement, span) for span in spans
        ):
            continue
        for span in spans:
            left, seconds = _bar(span)
            if seconds * points_per_second >= _label_width(placement, span):
                panel.text(
                    left + seconds / 2,
                    row,
                    _number(placement, span),
                    ha="center",
                    va="center_baseline",
                    fontsize=_LABEL_POINTS,
                    color=span.action.kind.label_colour,
                )


def _label_width(placement: Placement, span: Span) -> float:
    """In points: a digit of the default font is about 0.64 of its size wide, and a little air belongs on both sides."""
    return 0.64 * _LABEL_POINTS * len(_number(placement, span)) + 2.5


def _number(placement: Placement, span: Span) -> str:
    if placement.is_shared:
        return str(span.action.stage)
    return span.action.label if span.action.micro_batch is None else str(span.action.micro_batch)


def checked_titles(path: str | Path, timelines: Sequence[Timeline], titles: Sequence[str] | None) -> Sequence[str]:
    """The titles of timelines for a file. Raises ScheduleError: no timeline, or not one title for each."""
    titles = [title_of(timeline) for timeline in timelines] if titles is None else titles
    if not timelines or len(titles) != len(timelines):
        raise ScheduleError(
            f"cannot write {path}: {len(timelines)} timelines with {len(titles)} titles; give each one."
        )
    return titles


def title_of(timeline: Timeline) -> str:
    """The default title of a timeline: its schedule, K and M, and the replicas of its stages if there are any."""
    schedule, placement = timeline.schedule, timeline.schedule.placement
    replicas = f", replicas {'-'.join(map(str, placement.replicas))}" if placement.has_replicas else ""
    return f"{schedule.name}, K = {schedule.num_stages}, M = {schedule.num_micro_batches}{replicas}"


def _seconds(timeline: Timeline) -> str:
    """The total time, to four digits and in seconds."""
    return f"{float(timeline.total_seconds):.4g} s"
