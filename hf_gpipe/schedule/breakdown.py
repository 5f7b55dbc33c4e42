"""Breakdown of the time of a step by kind of work, as GPipe breaks down a time step (arXiv 1811.06965).

The kinds of work are computing, recomputation, sending, waiting and the optimizer, for each process and each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any

from hf_gpipe.schedule.kinds import KINDS, Resource, awaited_by
from hf_gpipe.schedule.simulate import Seconds, Span, Timeline
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.text import table_text


@dataclass(frozen=True)
class Parts:
    """Seconds of one step; together they are the whole step."""

    forward: Seconds = 0
    recompute: Seconds = 0
    backward: Seconds = 0
    """B, and I and W."""
    send: Seconds = 0
    """Sending messages."""
    wait: Seconds = 0
    """Idle: for a message or a reduction over replicas, before the first action and after the last one. It is the
    bubble."""
    update: Seconds = 0
    """The optimizer's, and adding up the gradients of tied parameters."""
    other: Seconds = 0
    """Between two actions; of a stage also its process's other stages, and that process's idle time at both ends."""

    @property
    def total(self) -> Seconds:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Breakdown:
    """The parts of a step, for each process and for each stage, as the process or stage itself spent them.

    Reductions and copies run beside other actions, as messages do, and are no part; waiting for them is. The parts of a
    process with several devices are the mean of its devices.
    """

    total_seconds: Seconds
    processes: tuple[Parts, ...]
    stages_of: tuple[Mapping[int, Parts], ...]
    """The parts of the step of each stage, by the stage's number, for each process."""

    @property
    def mean(self) -> Parts:
        """The mean of all processes."""
        return _mean(self.processes)

    @property
    def stages(self) -> tuple[Parts, ...]:
        """The parts of the step of each stage: the mean of its replicas, or of all processes for shared stages."""
        replicas: dict[int, list[Parts]] = {}
        for own in self.stages_of:
            for stage, parts in own.items():
                replicas.setdefault(stage, []).append(parts)
        return tuple(_mean(replicas[stage]) for stage in sorted(replicas))

    def to_dict(self) -> dict[str, Any]:
        """The breakdown as values of JSON, with seconds as floats."""
        processes = zip(self.stages_of, self.processes, strict=True)
        return {
            "total_seconds": float(self.total_seconds),
            "mean": _floats(self.mean),
            "processes": [{"stages": list(own), **_floats(parts)} for own, parts in processes],
            "stages": [_floats(parts) for parts in self.stages],
        }

    def text(self) -> str:
        """The table: one row per process, below it its stages if it has several, and the mean in the last row."""
        names = [field.name for field in fields(Parts)]
        rows = [["", *names]]
        for process, parts in enumerate(self.processes):
            own = self.stages_of[process]
            rows.append([f"process {process}", *self._cells(parts)])
            if len(own) > 1:
                rows += [[f"  stage {stage}", *self._cells(of_stage)] for stage, of_stage in own.items()]
        if len(self.processes) > 1:
            rows.append(["mean", *self._cells(self.mean)])
        return table_text(rows)

    def _cells(self, parts: Parts) -> list[str]:
        return [self._cell(getattr(parts, field.name)) for field in fields(Parts)]

    def _cell(self, seconds: Seconds) -> str:
        share = float(seconds / self.total_seconds) if self.total_seconds else 0.0
        return f"{float(seconds) * 1000:.1f} ms {share:4.0%}"


def breakdown(timeline: Timeline) -> Breakdown:
    """Sum up a timeline. With exact seconds (fractions) every sum is exact."""
    placement, total = timeline.schedule.placement, timeline.total_seconds
    processes: list[Parts] = []
    stages_of: list[dict[int, Parts]] = []
    for process in range(placement.num_processes):
        of_devices: dict[tuple[int, str | None], list[Span]] = {}
        for span in timeline.by_process.get(process, ()):
            if span.action.kind.resource is Resource.COMPUTE:
                of_devices.setdefault(placement.place_of(process, span.action.stage), []).append(span)
        parts = [] if of_devices else [Parts(wait=total)]
        waited: list[tuple[Span, Seconds]] = []
        for spans in of_devices.values():
            waits = _waits(spans, timeline.schedule)
            waited += zip(spans, waits, strict=True)
            # Before its first action and after its last one a device waits for the others.
            parts.append(_parts(spans, sum(waits) + spans[0].start + total - spans[-1].end, total))
        processes.append(_mean(parts))
        stages_of.append({})
        for stage in placement.stages_run_by(process):
            own = [(span, wait) for span, wait in waited if span.action.stage == stage]
            stages_of[-1][stage] = _parts([span for span, _ in own], sum(wait for _, wait in own), total)
    return Breakdown(total, tuple(processes), tuple(stages_of))


def _waits(spans: Sequence[Span], schedule: Schedule) -> list[Seconds]:
    """How long each span of a device waited for its message, or its stage's reduction: as noted, and the time since
    the span before it.

    A simulated span starts when its message is there, a measured one when the process came to it.
    """
    waits: list[Seconds] = []
    placement = schedule.placement
    for index, span in enumerate(spans):
        action = span.action
        # An update waits for its stage's reduction, and for the actions that the process starts on other devices.
        of_several = placement.has_replicas or placement.devices is not None
        awaited = awaited_by(action.kind)
        is_late = any(of_several if other.is_collective else other in schedule.kinds for other in awaited)
        receives = is_late or bool(schedule.sources(action))
        waits.append(span.waiting + (span.start - spans[index - 1].end if index > 0 and receives else 0))
    return waits


def _mean(rows: Sequence[Parts]) -> Parts:
    share = Fraction(1, len(rows))  # Exact seconds stay exact.
    return Parts(*(sum(getattr(parts, field.name) for parts in rows) * share for field in fields(Parts)))


def _parts(spans: Sequence[Span], wait: Seconds, total: Seconds) -> Parts:
    computing: dict[str, Seconds] = {}
    for kind in KINDS.values():
        of_kind = sum(span.computing for span in spans if span.action.kind == kind)
        computing[kind.part] = computing.get(kind.part, 0) + of_kind
    known = Parts(**computing, send=sum(span.sending for span in spans), wait=wait)
    return replace(known, other=total - known.total)


def _floats(parts: Parts) -> dict[str, float]:
    return {f"{name}_seconds": float(value) for name, value in asdict(parts).items()}
