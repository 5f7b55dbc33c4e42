"""The seconds that a process spends in a step on each kind of work, read off a simulated table."""

from __future__ import annotations

from dataclasses import dataclass

from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import KINDS, Resource


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds that a process spends in one step, by what it does; together they are the step."""

    forward: float
    recompute: float
    """The recomputation of whole stages. The recomputation of blocks is part of the backward."""
    backward: float
    """The backward, whole or in its two parts."""
    update: float
    bubble: float
    """Waiting, for other stages and for messages."""


def time_of(timeline: Timeline, process: int) -> TimeEstimate:
    """Estimate the seconds of a process in a step: the mean, where a table has several steps."""
    seconds = dict.fromkeys(KINDS.values(), 0.0)
    for span in timeline.by_process.get(process, ()):
        # What does not occupy the device goes on beside the other actions.
        if span.action.kind.resource is Resource.COMPUTE:
            seconds[span.action.kind] += float(span.busy) / timeline.schedule.num_steps
    step = float(timeline.total_seconds) / timeline.schedule.num_steps
    parts = {kind.part: sum(value for other, value in seconds.items() if other.part == kind.part) for kind in seconds}
    return TimeEstimate(**parts, bubble=max(step - sum(seconds.values()), 0.0))
