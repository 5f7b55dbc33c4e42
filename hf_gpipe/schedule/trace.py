"""Timelines as a trace file for chrome://tracing and https://ui.perfetto.dev.

The format is the JSON form of Chrome's trace events, as the document "Trace Event Format" describes it: complete events
("X") with their start and duration in microseconds, names of processes and threads ("M"), and counters ("C"). A
timeline is a process of the trace, and a stage or a replica of a stage is a thread, so timelines stand below each other
on one scale. Reductions and copies go on beside the actions of their process's other stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_gpipe.schedule.draw import checked_titles, name_in_text, row_name
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import Amounts, occupancy
from hf_gpipe.schedule.simulate import Seconds, Span, Timeline

Event = dict[str, Any]


def write_trace(path: str | Path, *timelines: Timeline, titles: Sequence[str] | None = None) -> None:
    """Write one or several timelines into a trace file.

    An event is named after its action ("2F0") and has its kind as category; the waiting before it and the sending at
    its end are events of their own. Counters show how many micro-batches each stage holds between F and B.

    Args:
        path: where to write; by habit it ends in .json.
        titles: what each timeline is, for example ("measured", "predicted"); None: their schedules, K and M.

    Raises:
        ScheduleError: no timeline, or not one title for each.
    """
    titles = checked_titles(path, timelines, titles)
    events: list[Event] = []
    for number, (timeline, title) in enumerate(zip(timelines, titles, strict=True)):
        events += [{**event, "pid": number} for event in _events(timeline, title)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events(timeline: Timeline, title: str) -> Iterator[Event]:
    placement = timeline.schedule.placement
    threads = {row: number for number, row in enumerate(placement.rows)}
    yield {"ph": "M", "name": "process_name", "args": {"name": title}}
    for row, thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": row_name(placement, *row)}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": {"sort_index": thread}}
    for span in timeline.spans:
        yield from _parts(span, threads[placement.row_of(span.action.stage, span.process)])
    if timeline.spans and timeline.schedule.is_training:
        for stage, process in threads:
            stages = placement.stages_run_by(process) if stage is None else (stage,)
            held: dict[int, Amounts] = {own_stage: {Held.MICRO_BATCH: {"micro-batches": 1}} for own_stage in stages}
            for time, level in occupancy(timeline, held, process):
                name = f"live micro-batches of {name_in_text(placement, stage, process)}"
                yield {"ph": "C", "name": name, "ts": _microseconds(time), "args": level}


def _parts(span: Span, thread: int) -> Iterator[Event]:
    """The waiting, the computation and the sending of an action; what takes no time is left out."""
    computes, sends = span.computes, span.end - span.sending
    parts = [
        ("wait", "wait", span.start, computes),
        (str(span.action), span.action.kind.word, computes, sends),
        ("send", "send", sends, span.end),
    ]
    for name, category, start, end in parts:
        if end > start:
            yield {
                "ph": "X",
                "name": name,
                "cat": category,
                "tid": thread,
                "ts": _microseconds(start),
                "dur": _microseconds(end - start),
                "args": {"action": str(span.action), "process": span.process},
            }


def _microseconds(seconds: Seconds) -> float:
    return float(seconds * 1_000_000)
