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
        self._every = every if len(set(self._world.hosts)) > 1 else None
        self._num_steps, self._named = 0, set[int]()
        self._fastest: float | None = None
        #: The seconds of each process at the first comparison, in the process that prints.
        self._first: Sequence[float | None] | None = None

    def times(self, num_steps: int) -> list[ActionTime] | None:
        """The list in which the executor notes the actions of the next step or window; None: it is not timed."""
        is_timed = self._every is not None and self._passes(max(1, self._every // _TIMED), num_steps)
        return [] if is_timed else None

    def count(self, num_steps: int, times: Sequence[ActionTime] | None) -> None:
        """Note `num_steps` steps, with the times of this process's actions if they were timed."""
        if self._every is None:
            return
        seconds = seconds_of_forward((t.action, t.end - t.start - t.waiting - t.sending) for t in times or ())
        self._fastest = min((s for s in (self._fastest, seconds) if s is not None), default=None)
        is_due = self._passes(self._every, num_steps)
        self._num_steps += num_steps
        if is_due:
            everyone, self._fastest = self._world.gather_objects(self._fastest), None
            if self._world.is_main:
                self._compare(everyone)

    def _passes(self, interval: int, num_steps: int) -> bool:
        return (self._num_steps + num_steps) // interval > self._num_steps // interval

    def _compare(self, measured: Sequence[float | None]) -> None:
        hosts, placement = self._world.hosts, self._world.placement
        workers = [placement.worker_with(process) for process in range(len(hosts))]
        expected, most, where = self._first, _SLOWER, "in its first steps"
        if expected is None:
            try:
                spans = self._pipe.plan().timeline.spans
            except UserError:  # no example of a mini-batch, or an optimizer that the planner does not know
                spans = ()
            own = [[(span.action, float(span.computing)) for span in spans if span.process == w] for w in workers]
            expected, most, where = list(map(seconds_of_forward, own)), _SLOWER_THAN_PLANNED, "by the plan"
            self._first = measured
        both = enumerate(zip(measured, expected, strict=True))
        ratios = {process: seconds / usual for process, (seconds, usual) in both if seconds is not None and usual}
        for process, ratio in ratios.items():
            others = [other_s for other, other_s in ratios.items() if hosts[other] != hosts[process]]
            if process not in self._named and others and ratio / median(others) >= most:
                self._named.add(process)
                logger.warning(
                    f"machine {hosts[process]} is slow: in the last {self._every} steps process {process} (stage "
                    f"{', '.join(map(str, placement.stages_of(workers[process])))}) computed "
                    f"{ratio / median(others):.1f} times as long as {where}, compared with the other machines; see "
                    "what else runs there, or leave the machine out"
                )


def seconds_of_forward(actions: Iterable[tuple[Action, float]]) -> float | None:
    """The seconds of all actions that compute, divided by the number of forwards; None: there is no forward."""
    own = [(a.kind, s) for a, s in actions if a.kind.resource is Resource.COMPUTE and not a.kind.is_of_mini_batch]
    forwards = sum(kind == FORWARD for kind, _ in own)
    return sum(seconds for _, seconds in own) / forwards if forwards else None
