"""Find a machine that is slow but not lost, for which all others wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

import transformers

from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Action
from hf_gpipe.schedule.kinds import FORWARD, Resource

logger = transformers.logging.get_logger(__name__)

#: The number of timed steps between two comparisons. The fastest step counts: other programs disturb some steps.
_TIMED = 10
#: The ratio of times, compared with other machines, from which a machine is named as slow: relative to its own first
#: steps, and relative to the plan, whose estimates are less exact.
_SLOWER, _SLOWER_THAN_PLANNED = 1.5, 2.0


class SlowMachines:
    """Compares how long the actions of each process take. Every process has one and calls it in step with the others.

    In a step all processes compute the same rows, so the seconds of a process, divided by its expected seconds, are
    compared with this ratio of the other machines' processes. At first the plan gives the expected seconds, if the
    pipeline has a plan. Later they are the seconds of the process at the first comparison.

    Args:
        pipe: the pipeline that is trained.
        every: the number of steps between two comparisons. Nothing is timed or compared with None, or where all
            processes are on one machine.
    """

    def __init__(self, pipe: Pipeline, every: int | None) -> None:
        self._pipe, self._world = pipe, pipe.world
        self._hosts = self._world.hosts
        self._every = every if len(set(self._hosts)) > 1 else None
        self._num_steps = 0
        self._seconds: list[float] = []
        #: The seconds of each process at the first comparison, in the process that prints.
        self._first: list[float | None] | None = None
        self._named: set[int] = set()

    def times(self, num_steps: int) -> list[ActionTime] | None:
        """The list in which the executor notes the actions of the next step or window; None: it is not timed."""
        if self._every is None:
            return None
        interval = max(1, self._every // _TIMED)
        return [] if self._passes(interval, num_steps) else None

    def count(self, num_steps: int, times: Sequence[ActionTime] | None) -> None:
        """Note `num_steps` steps, with the times of this process's actions if they were timed."""
        if self._every is None:
            return
        seconds = seconds_of_forward((t.action, t.end - t.start - t.waiting - t.sending) for t in times or ())
        if seconds is not None:
            self._seconds.append(seconds)
        is_due = self._passes(self._every, num_steps)
        self._num_steps += num_steps
        if is_due:
            everyone = self._world.gather_objects(min(self._seconds, default=None))
            self._seconds = []
            if self._world.is_reporter:
                self._compare(everyone)

    def _passes(self, interval: int, num_steps: int) -> bool:
        return (self._num_steps + num_steps) // interval > self._num_steps // interval

    def _compare(self, measured: Sequence[float | None]) -> None:
        if self._first is not None:
            self._tell(measured, self._first, _SLOWER, "in its first steps")
            return
        self._tell(measured, self._planned(), _SLOWER_THAN_PLANNED, "by the plan")
        self._first = list(measured)

    def _planned(self) -> list[float | None]:
        try:
            timeline = self._pipe.plan().timeline
        except UserError:  # no example of a mini-batch, or an optimizer that the planner does not know
            return [None] * len(self._hosts)
        return [
            seconds_of_forward((s.action, float(s.computing)) for s in timeline.spans if s.process == process)
            for process in map(self._world.placement.worker_with, range(len(self._hosts)))
        ]

    def _tell(
        self, measured: Sequence[float | None], expected: Sequence[float | None], most: float, where: str
    ) -> None:
        for process, ratio in ratios(measured, expected, self._hosts).items():
            if ratio < most or process in self._named:
                continue
            self._named.add(process)
            placement = self._world.placement
            stages = ", ".join(map(str, placement.stages_of(placement.worker_with(process))))
            logger.warning(
                f"machine {self._hosts[process]} is slow: in the last {self._every} steps process {process} (stage "
                f"{stages}) computed {ratio:.1f} times as long as {where}, compared with the other machines; see what "
                "else runs there, or leave the machine out"
            )


def seconds_of_forward(actions: Iterable[tuple[Action, float]]) -> float | None:
    """The seconds of all actions that compute, divided by the number of forwards; None: there is no forward."""
    of_micro_batches = [(action.kind, seconds) for action, seconds in actions if not action.kind.is_of_mini_batch]
    computing = [(kind, seconds) for kind, seconds in of_micro_batches if kind.resource is Resource.COMPUTE]
    forwards = sum(kind == FORWARD for kind, _ in computing)
    return sum(seconds for _, seconds in computing) / forwards if forwards else None


def ratios(
    measured: Sequence[float | None], expected: Sequence[float | None], hosts: Sequence[str]
) -> dict[int, float]:
    """The measured seconds of each process per expected second, divided by this ratio of the other machines.

    Args:
        measured: the seconds of each process; None: it has computed nothing.
        expected: the seconds of each process by a plan, or by an earlier measurement.
        hosts: the machine of each process.
    """
    own = {
        process: seconds / usual
        for process, (seconds, usual) in enumerate(zip(measured, expected, strict=True))
        if seconds is not None and usual
    }
    compared = {}
    for process, ratio in own.items():
        others = [other_ratio for other, other_ratio in own.items() if hosts[other] != hosts[process]]
        if others:
            compared[process] = ratio / median(others)
    return compared
