"""The executor at depths that this machine cannot compute: stages that wait instead of computing.

Everything else is real: the tables, the executor, the edges, the messages over gloo between processes. A wait takes
exactly its time, so what a step takes beyond the table's own time is the executor's and the messages'. Where messages
or reductions take a time, their links are emulated too (`slow_links.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench import machine
from bench.processes import run_job
from bench.slow_links import SlowReplicas, slow
from bench.waiting import WaitingHead, WaitingStage, WaitingVisits, wait
from hf_gpipe.job.world import World
from hf_gpipe.modes.divided_head import runtime as divided_head
from hf_gpipe.modes.divided_head.edges import connect_head
from hf_gpipe.modes.visits import runtime as visiting
from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.late_updates import LATE_UPDATE
from hf_gpipe.modes.visits.relays import connect_relays
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.late_updates import LateUpdates
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.micro_batch import MicroBatch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.step import StepResult
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Costs, Schedule, seconds_of_steps, simulate
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import RECOMPUTE, Resource

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Emulated:
    """A pipeline that only waits.

    Attributes:
        table: the actions that run.
        costs: of each stage, as the simulation takes them. Updates, L and D take as long in all stages. Messages take
            as long as `boundary_bytes` take, where they have no seconds for each boundary.
        boundary_bytes: what crosses a boundary for each micro-batch.
        name: for people.
        steps: how many run one after another, measured as one: no process waits for the end of another's step.
        late_seconds: of all recomputations that are a part of backwards.
    """

    table: Schedule
    costs: Costs
    boundary_bytes: int = 4096
    name: str = ""
    steps: int = 1
    late_seconds: float = 0.0

    @cached_property
    def seconds(self) -> dict[Action, float]:
        """Of each action that computes, but for updates."""
        spans = simulate(self.table, self.costs).spans
        computing = (span for span in spans if span.action.kind.resource is Resource.COMPUTE)
        return {span.action: float(span.computing) for span in computing if not span.action.kind.changes_weights}

    @property
    def reduce_seconds(self) -> dict[int, float]:
        """Of each stage."""
        seconds: Any = self.costs.reduce_seconds
        each = seconds if isinstance(seconds, Sequence) else [seconds] * self.table.num_stages
        return dict(enumerate(map(float, each)))

    @property
    def replicas(self) -> int:
        """D, of the first stage, as of all others where `bound` is asked for."""
        return self.table.placement.replicas[0]

    @property
    def processes(self) -> int:
        """K, of one pipeline."""
        return self.table.placement.num_processes // self.replicas

    @property
    def one_process_seconds(self) -> float:
        """The time that one process would need for the work of all, without recomputation."""
        work = sum(seconds for action, seconds in self.seconds.items() if action.kind != RECOMPUTE)
        return self.steps * (work - self.late_seconds)

    @property
    def bound(self) -> float:
        """The most that D pipelines of K processes can be faster than one process (GPipe, section 2.3)."""
        count = self.table.num_micro_batches
        return count * self.processes / (ceil(count / self.replicas) + self.processes - 1)

    @property
    def predicted_seconds(self) -> float:
        """Of the steps, by the simulation of the table."""
        return float(seconds_of_steps(self.table, self.costs, self.steps))


class Step(NamedTuple):
    """The times of one step: of one process, with its beginning and end on one clock, or of all processes together.

    Attributes:
        seconds: from the first process's beginning to the last one's end.
        cpu_seconds: of the cores, over all processes and their threads: the executor, the messages and the waking up.
        late_seconds: by which actions took longer than they should, for the system woke them up late; a mean over
            processes, as the next one.
        sending_seconds: that handing messages over took.
    """

    seconds: float
    cpu_seconds: float
    late_seconds: float
    sending_seconds: float
    start: float = 0.0

    @classmethod
    def of_all(cls, parts: Sequence[Step]) -> Step:
        seconds = max(part.start + part.seconds for part in parts) - min(part.start for part in parts)
        late, sending = (mean(getattr(part, name) for part in parts) for name in ("late_seconds", "sending_seconds"))
        return cls(seconds, sum(part.cpu_seconds for part in parts), late, sending)


def emulate(
    settings: list[Emulated], steps: int, on_step: Callable[[str], None] = lambda text: None
) -> list[list[Step]]:
    """Each of `steps` steps of each setting; the settings of one number of processes take turns."""
    results: list[list[Step]] = [[] for _ in settings]
    sizes = [setting.table.placement.num_processes for setting in settings]
    for processes in sorted(set(sizes)):
        numbers = [i for i, size in enumerate(sizes) if size == processes]
        given = ([settings[i] for i in numbers], steps)
        parts = run_job(_emulate_process, given, processes, fork=True, timeout_seconds=3600)
        for i, of_setting in zip(numbers, zip(*parts, strict=True), strict=True):
            results[i] = [Step.of_all(step) for step in zip(*of_setting, strict=True)]
        on_step(f"{processes} processes")
    return results


def _emulate_process(settings: list[Emulated], steps: int) -> list[list[Step]]:
    """One process's part of each step of each setting."""
    machine.wake_up_on_time()
    ready = [_Pipeline(setting) for setting in settings]
    results: list[list[Step]] = [[] for _ in settings]
    for step in range(steps + 1):
        for i in range(len(settings))[:: -1 if step % 2 else 1]:
            times: list[ActionTime] = []
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(settings[i].steps):
                ready[i].step(times, is_one_of_several=settings[i].steps > 1)
            if step:  # the first one warms up
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
                late = sum(_late_seconds(settings[i], span) for span in times)
                results[i].append(Step(seconds, cpu_seconds, late, sum(span.sending for span in times), start))
    return results


def _late_seconds(setting: Emulated, span: ActionTime) -> float:
    """By which an action took longer than it should."""
    if span.action.kind.changes_weights:
        return 0.0  # the last U of a process has the updates of all its stages
    return span.end - span.start - span.waiting - span.sending - setting.seconds.get(span.action, 0.0)


class _Pipeline:
    """One process's stages, edges and executor."""

    def __init__(self, setting: Emulated) -> None:
        self.table = setting.table
        world = Mesh.of(World.current(), self.table.placement)
        transfer: Any = setting.costs.transfer_seconds
        is_slow = isinstance(transfer, Sequence)
        boundary = (
            torch.zeros(1, dtype=torch.float64) if is_slow else torch.zeros(setting.boundary_bytes // _FLOAT_BYTES)
        )
        # The executor is typed for stages that compute.
        own = self.table.placement.stages_run_by(world.worker)
        waiting = {number: WaitingStage(setting.table, setting.seconds, number, boundary) for number in own}
        stages = {number: cast(Stage, stage) for number, stage in waiting.items()}
        edges = connect(world, lambda stage, name: boundary.dtype)
        if is_slow:
            edges = {where: slow(edge, transfer[where[0]]) for where, edge in edges.items()}
        self.replicas = None
        if self.table.placement.has_replicas:
            names = {name: number for number, stage in waiting.items() for name in stage.parameters}
            ties = SimpleNamespace(names=frozenset(), owner_stage=names)
            self.replicas = SlowReplicas(waiting, ties, world, setting.reduce_seconds)
        rows = {world.worker: stages}
        modes = {name: mode.State(rows) for name, mode in parts_of_modes("runtime").items()}
        visits: Any = WaitingVisits(setting.costs, most_loaded(self.table)[world.worker])
        self.late = LateUpdates()
        modes[visiting.NAME] = visiting.State(rows, {world.worker: visits}, connect_relays(world), late=self.late)
        if self.table.has_turns:
            parts: Any = {number: WaitingHead(setting.table, setting.seconds, number, boundary) for number in own}
            of_head = connect_head(world, lambda name: boundary.dtype)
            modes[divided_head.NAME] = divided_head.State(rows, parts, of_head)
        self.executor = Executor(rows, edges, self.replicas, modes)
        self.world = world
        #: Of the step before, where several run one after another.
        self.earlier: Callable[[], torch.Tensor] | None = None
        self.own = self.table.placement.stages_of(world.worker)
        self.update_seconds = float(cast(Any, setting.costs.update_seconds))
        late: Any = setting.costs.of(LATE_UPDATE)[1] if LATE_UPDATE in self.table.kinds else 0.0
        self.late_seconds = float(late)
        count = self.table.num_micro_batches
        inputs: dict[str, Any] = {}
        self.micro_batches = [MicroBatch(i, inputs, 0, 1, count) for i in range(count)]

    def step(self, times: list[ActionTime], *, is_one_of_several: bool) -> None:
        def reduce(_: StepResult) -> None:
            if self.replicas is not None:
                self.replicas.finish()
            if (self.update_seconds or self.late_seconds) and HOST_UPDATE not in self.table.kinds:
                # Gradients of all stages are complete.
                self.world.barrier()
            if is_one_of_several:
                # Loss and norm, which are read after the next step, as in a training.
                earlier, self.earlier = self.earlier, self.world.begin_sum(torch.zeros(2))
                if earlier is not None:
                    earlier()

        if self.replicas is not None:
            self.replicas.begin()
        run = partial(self.executor.run, self.table, self.micro_batches, is_measured=True)
        if self.table.is_window:
            # Stages that wait have no weights: an update takes no time.
            times.extend(run(update_stage=lambda stage, step: None).times)
        elif HOST_UPDATE in self.table.kinds:
            times.extend(run(reduce=reduce, update_stage=lambda *_: wait(self.update_seconds)).times)
        else:
            times.extend(run(reduce=reduce, update=lambda: wait(len(self.own) * self.update_seconds)).times)
            for stage in self.own if self.late_seconds else ():
                self.late.add(stage, partial(wait, self.late_seconds))
