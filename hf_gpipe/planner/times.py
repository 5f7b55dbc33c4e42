"""The seconds that a process spends in a step on each kind of work, read off a simulated table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import KINDS, Held, Resource


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds that a process spends in one step, by what it does; together they are the step."""

    forward: float
    recompute: float
    """The recomputation of whole stages, and that of blocks, which the backward makes."""
    backward: float
    """The backward, whole or in its two parts."""
    update: float
    bubble: float
    """Waiting, for other stages and for messages."""


def time_of(timeline: Timeline, process: int, again: Sequence[float]) -> TimeEstimate:
    """Estimate the seconds of a process in a step: the mean, where a table has several steps.

    Args:
        timeline: the simulated table.
        process: the number of the process.
        again: the seconds in which a backward of each stage recomputes blocks.
    """
    parts = dict.fromkeys((kind.part for kind in KINDS.values()), 0.0)
    for span in timeline.by_process.get(process, ()):
        kind, seconds = span.action.kind, float(span.busy) / timeline.schedule.num_steps
        # What does not occupy the device goes on beside the other actions.
        if kind.resource is Resource.COMPUTE:
            is_backward = kind.working is Held.BACKWARD
            recomputed = min(again[span.action.stage] / timeline.schedule.num_steps, seconds) if is_backward else 0.0
            parts["recompute"] += recomputed
            parts[kind.part] += seconds - recomputed
    step = float(timeline.total_seconds) / timeline.schedule.num_steps
    return TimeEstimate(**parts, bubble=max(step - sum(parts.values()), 0.0))
