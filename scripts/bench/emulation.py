"""The executor at depths that this machine cannot compute: stages that wait instead of computing.

Everything else is real: the tables, the executor, the edges, the messages over gloo between processes. A wait takes
exactly its time, so what a step takes beyond the table's own time is the executor's and the messages'. Where messages
or reductions take a time, their links are emulated too (`slow_links.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench import machine
from bench.processes import run_job
from bench.slow_links import SlowReplicas, slow
from bench.waiting import WaitingStage, WaitingVisits, wait
from hf_gpipe.job.world import World
from hf_gpipe.runtime.edges import connect, connect_head, connect_relays
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.micro_batch import MicroBatch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.step import Row, StepResult
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.runtime.visits import VisitingWeights
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES, Costs, Schedule, build, seconds_of_steps
from hf_gpipe.schedule.builders import placement_for
from hf_gpipe.schedule.kinds import (
    BACKWARD,
    DROP,
    FORWARD,
    HOST_UPDATE,
    INPUT,
    LOAD,
    LOGITS,
    LOGITS_GRADIENT,
    RECOMPUTE,
    WEIGHT,
)
from hf_gpipe.schedule.updates import with_updates_beside
from hf_gpipe.schedule.visits import most_loaded

_FLOAT_BYTES = 4
#: Kinds whose time is not of `Costs`, in the order of `head_seconds` and `copy_seconds`.
_OTHERS = (LOGITS, LOGITS_GRADIENT, LOAD, DROP)


@dataclass(frozen=True)
class Emulated:
    """A pipeline that only waits.

    Attributes:
        processes: K, of one pipeline.
        stages_each: stages that each process holds; they share its work.
        forward_seconds: of one micro-batch in one process, over all its stages, or for each of K stages; a
            recomputation takes as long.
        backward_seconds: the same.
        weight_seconds: the part of it that W takes, and I the rest; None: half of it.
        table_text: the table that runs, in place of the one that `schedule` and `recompute` name.
        boundary_bytes: what crosses a boundary for each micro-batch.
        recomputes_late: whether a stage waits for the gradient before it recomputes, as torch.utils.checkpoint does;
            the tables recompute before it arrives (GPipe, section 2).
        replicas: of every stage, or of each.
        reduce_seconds: of a stage's gradients over its replicas, or for each stage.
        steps: how many run one after another, measured as one: no process waits for the end of another's step.
        step_size: of an asynchronous schedule, whose window has all micro-batches, the micro-batches of each update.
        chunk_shares: of rows that are cut into chunks, which count as micro-batches, the time of each as a multiple of
            that of a micro-batch, with the mean 1; (1,): rows are whole.
        transfer_seconds: of a message on an edge, for each of the K - 1 boundaries; None: as long as `boundary_bytes`
            take.
        head_seconds: of S and T of one micro-batch in each stage, where the schedule divides the head.
        copy_seconds: of L and D of each stage, where its weights visit: bytes over the link's bytes a second.
        update_seconds: of each stage's U or H.
        updates_beside: whether dealt stages are updated beside backwards.
    """

    schedule: str
    processes: int
    micro_batches: int
    forward_seconds: float | Sequence[float]
    backward_seconds: float | Sequence[float]
    boundary_bytes: int
    recompute: str = "none"
    stages_each: int = 1
    recomputes_late: bool = False
    replicas: int | Sequence[int] = 1
    reduce_seconds: float | Sequence[float] = 0.0
    transfer_seconds: Sequence[float] | None = None
    steps: int = 1
    step_size: int = 1
    weight_seconds: float | Sequence[float] | None = None
    table_text: str | None = None
    chunk_shares: Sequence[float] = (1.0,)
    head_seconds: tuple[float, float] = (0.0, 0.0)
    copy_seconds: tuple[float, float] = (0.0, 0.0)
    update_seconds: float = 0.0
    updates_beside: bool = False

    def table(self) -> Schedule:
        """The actions that run; a late recomputation is part of the backward."""
        table = self._early_table()
        if not self.recomputes_late:
            return with_updates_beside(table) if self.updates_beside else table
        actions = (tuple(action for action in own if action.kind != RECOMPUTE) for own in table.actions)
        return replace(table, actions=tuple(actions))

    def _early_table(self) -> Schedule:
        if self.table_text is not None:
            return Schedule.from_text(self.table_text)
        placement = placement_for(self.schedule, self.num_stages, self.num_processes, self.replicas)
        steps = None
        if self.schedule in ASYNCHRONOUS_SCHEDULES:
            steps = [self.step_size] * (self.micro_batches // self.step_size)
        chunks = len(self.chunk_shares)
        return build(
            self.schedule, self.num_stages, self.micro_batches, placement, self.recompute, steps=steps, chunks=chunks
        )

    @property
    def num_stages(self) -> int:
        return self.processes * self.stages_each

    @property
    def num_processes(self) -> int:
        """Of all replicas together."""
        return self.processes * self.replicas if isinstance(self.replicas, int) else sum(self.replicas)

    @property
    def has_replicas(self) -> bool:
        return self.num_processes > self.processes

    def reduction_seconds(self) -> list[float]:
        """Of each stage."""
        return self._each(self.reduce_seconds)

    def _each(self, seconds: float | Sequence[float]) -> list[float]:
        return list(seconds) if isinstance(seconds, Sequence) else [seconds] * self.num_stages

    def stage_seconds(self, stage: int) -> tuple[float, float]:
        """Of one micro-batch's forward and backward in one stage. Raises ValueError for one that recomputes in part."""
        forward = self._each(self.forward_seconds)[stage] / self.stages_each
        backward = self._each(self.backward_seconds)[stage] / self.stages_each
        if not self.recomputes_late or (count := self._early_table().num_recomputations(stage)) == 0:
            return forward, backward
        if count != self.micro_batches:
            raise ValueError(f"stage {stage} recomputes {count} of {self.micro_batches} micro-batches; expected all")
        return forward, forward + backward

    def weight_seconds_of(self, stage: int) -> float:
        """Of one micro-batch's W in one stage."""
        if self.weight_seconds is None:
            return self.stage_seconds(stage)[1] / 2
        return self._each(self.weight_seconds)[stage] / self.stages_each

    def predicted_seconds(self) -> float:
        """Of the steps, by the simulation of the table: with free messages where they have no time of their own."""
        forward, backward = zip(*map(self.stage_seconds, range(self.num_stages)), strict=True)
        transfer = 0 if self.transfer_seconds is None else self.transfer_seconds
        weights = [*map(self.weight_seconds_of, range(self.num_stages))]
        inputs = [whole - weight for whole, weight in zip(backward, weights, strict=True)]
        forward, backward, inputs, weights = (
            [[seconds * share for share in self.chunk_shares] for seconds in each]
            for each in (forward, backward, inputs, weights)
        )
        costs = Costs(
            forward,
            backward,
            input_seconds=inputs,
            weight_seconds=weights,
            transfer_seconds=transfer,
            reduce_seconds=self.reduction_seconds(),
            update_seconds=self.update_seconds,
            others=dict(zip(_OTHERS, (*self.head_seconds, *self.copy_seconds), strict=True)),
        )
        return float(seconds_of_steps(self.table(), costs, self.steps))

    @property
    def one_process_seconds(self) -> float:
        """The time that one process would need for the work of all, without recomputation."""
        each = sum(self._each(self.forward_seconds)) + sum(self._each(self.backward_seconds))
        each = each / self.stages_each + self.num_stages * sum(self.head_seconds)
        return self.steps * self.micro_batches * each

    @property
    def bound(self) -> float:
        """The most that D pipelines of K processes can be faster than one process (GPipe, section 2.3)."""
        each = ceil(self.micro_batches * self.processes / self.num_processes)
        return self.micro_batches * self.processes / (each + self.processes - 1)


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
    for processes in sorted({setting.num_processes for setting in settings}):
        numbers = [i for i, setting in enumerate(settings) if setting.num_processes == processes]
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
    forward, backward = setting.stage_seconds(span.action.stage)
    weight = setting.weight_seconds_of(span.action.stage)
    should = {FORWARD: forward, RECOMPUTE: forward, BACKWARD: backward, INPUT: backward - weight, WEIGHT: weight}
    should |= dict(zip(_OTHERS, setting.head_seconds, strict=False))
    if span.action.kind.changes_weights:
        return 0.0  # the last U of a process has the updates of all its stages
    if span.action.kind not in should:
        return span.end - span.start - span.waiting - span.sending
    share = setting.chunk_shares[span.action.micro_batch % len(setting.chunk_shares)]
    return span.end - span.start - span.waiting - span.sending - share * should[span.action.kind]


class _Pipeline:
    """One process's stages, edges and executor."""

    def __init__(self, setting: Emulated) -> None:
        self.table = setting.table()
        world = World.of_job().placed(self.table.placement)
        boundary = torch.zeros(setting.boundary_bytes // _FLOAT_BYTES)
        if setting.transfer_seconds is not None:
            boundary = torch.zeros(1, dtype=torch.float64)
        # The executor is typed for stages that compute.
        own = self.table.placement.stages_run_by(world.worker)
        waiting = {number: WaitingStage(setting, number, boundary) for number in own}
        stages = {number: cast(Stage, stage) for number, stage in waiting.items()}
        edges = connect(world, lambda stage, name: boundary.dtype)
        if setting.transfer_seconds is not None:
            edges = {where: slow(edge, setting.transfer_seconds[where[0]]) for where, edge in edges.items()}
        self.replicas = None
        if setting.has_replicas:
            names = {name: number for number, stage in waiting.items() for name in stage.parameters}
            ties = SimpleNamespace(names=frozenset(), owner_stage=names)
            seconds = dict(enumerate(setting.reduction_seconds()))
            self.replicas = SlowReplicas(waiting, ties, world, seconds)
        of_head = connect_head(world, lambda name: boundary.dtype) if self.table.divides_head else {}
        visits = cast(VisitingWeights, WaitingVisits(setting, most_loaded(self.table)[world.worker]))
        rows = {world.worker: Row(stages, visits)}
        self.executor = Executor(rows, edges, self.replicas, of_head, connect_relays(world))
        self.world = world
        #: Of the step before, where several run one after another.
        self.earlier: Callable[[], torch.Tensor] | None = None
        self.own, self.update_seconds = self.table.placement.stages_of(world.worker), setting.update_seconds
        count = setting.micro_batches
        inputs: dict[str, Any] = {}
        self.micro_batches = [MicroBatch(i, inputs, 0, 1, count) for i in range(count)]

    def step(self, times: list[ActionTime], *, is_one_of_several: bool) -> None:
        def reduce(_: StepResult) -> None:
            if self.replicas is not None:
                self.replicas.finish()
            if self.update_seconds and HOST_UPDATE not in self.table.kinds:
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
        if self.table.is_asynchronous:
            # Stages that wait have no weights: an update takes no time.
            times.extend(run(update_stage=lambda stage, step: None).times)
        elif HOST_UPDATE in self.table.kinds:
            times.extend(run(reduce=reduce, update_stage=lambda *_: wait(self.update_seconds)).times)
        else:
            times.extend(run(reduce=reduce, update=lambda: wait(len(self.own) * self.update_seconds)).times)
