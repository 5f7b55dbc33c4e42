"""The executor at depths that this machine cannot compute: stages that wait instead of computing.

Everything else is real: the tables, the executor, the edges, the messages over gloo between processes. A wait takes
exactly its time, so what a step takes beyond the table's own time is the executor's and the messages'.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from bench import machine
from bench.processes import Job, run_job
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.schedule import ActionKind, Costs, Schedule, build, simulate
from hf_gpipe.schedule.builders import placement_for

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Emulated:
    """A pipeline that only waits.

    Attributes:
        processes: K.
        stages_each: stages that each process holds; they share its work.
        forward_seconds: of one micro-batch in one process, over all its stages; a recomputation takes as long.
        backward_seconds: the same.
        boundary_bytes: what crosses a boundary for each micro-batch.
        recomputes_late: whether a stage waits for the gradient before it recomputes, as torch.utils.checkpoint does;
            the tables recompute before it arrives (GPipe, section 2).
    """

    schedule: str
    processes: int
    micro_batches: int
    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int
    recompute: str = "none"
    stages_each: int = 1
    recomputes_late: bool = False

    def table(self) -> Schedule:
        """The actions that run; a late recomputation is part of the backward."""
        table = self._early_table()
        if not self.recomputes_late:
            return table
        return replace(
            table,
            actions=tuple(tuple(one for one in own if one.kind != ActionKind.RECOMPUTE) for own in table.actions),
        )

    def _early_table(self) -> Schedule:
        num_stages = self.processes * self.stages_each
        placement = placement_for(self.schedule, num_stages, self.processes)
        return build(self.schedule, num_stages, self.micro_batches, placement, self.recompute)

    def stage_seconds(self, stage: int) -> tuple[float, float]:
        """Of one micro-batch's forward and backward in one stage. Raises ValueError for one that recomputes in part."""
        forward, backward = self.forward_seconds / self.stages_each, self.backward_seconds / self.stages_each
        if not self.recomputes_late or (count := self._early_table().num_recomputations(stage)) == 0:
            return forward, backward
        if count != self.micro_batches:
            raise ValueError(f"stage {stage} recomputes {count} of {self.micro_batches} micro-batches; expected all")
        return forward, forward + backward

    def predicted_seconds(self) -> float:
        """Of a step with free messages, by the simulation of the table."""
        forward, backward = zip(*map(self.stage_seconds, range(self.processes * self.stages_each)), strict=True)
        return float(simulate(self.table(), Costs(forward, backward)).total_seconds)

    @property
    def one_process_seconds(self) -> float:
        """The time that one process would need for the work of all, without recomputation."""
        return self.processes * self.micro_batches * (self.forward_seconds + self.backward_seconds)

    @property
    def bound(self) -> float:
        """The most that K processes can be faster than one with one stage each (GPipe, section 2.3)."""
        return self.micro_batches * self.processes / (self.micro_batches + self.processes - 1)


class WaitingStage:
    """Has the part of `Stage` that the executor uses, and waits."""

    def __init__(self, setting: Emulated, number: int, boundary: torch.Tensor) -> None:
        num_stages = setting.processes * setting.stages_each
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        self.device = boundary.device
        self.trainable_outputs: Mapping[str, bool] = {} if self.is_last else {"hidden": True}
        self._forward_seconds, self._backward_seconds = setting.stage_seconds(number)
        self._message = {"hidden": boundary}
        self._shapes: Shapes = {"hidden": tuple(boundary.shape)}

    def forward(self, context: Context, *, keep_graph: bool) -> dict[str, torch.Tensor]:
        wait(self._forward_seconds)
        return {} if self.is_last else self._message

    def recompute(self, micro_batch: int) -> None:
        wait(self._forward_seconds)

    def backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wait(self._backward_seconds)
        return {} if self.is_first else self._message

    def _boundary(self, micro_batch: MicroBatch) -> Shapes:
        return self._shapes

    input_shapes = output_shapes = input_gradient_shapes = output_gradient_shapes = _boundary

    def reset(self) -> None:
        """There is nothing to forget."""


def wait(seconds: float) -> None:
    """Sleep until so long after now: time spent on going to sleep is part of it."""
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class Step(NamedTuple):
    """The times of one step of all processes.

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


class _Part(NamedTuple):
    """One process's part of a step; beginning and end on one clock."""

    start: float
    end: float
    cpu_seconds: float
    late_seconds: float
    sending_seconds: float


def emulate(
    settings: list[Emulated], steps: int, on_step: Callable[[str], None] = lambda text: None
) -> list[list[Step]]:
    """Each of `steps` steps of each setting; the settings of one number of processes take turns."""
    found: list[list[Step]] = [[] for _ in settings]
    for processes in sorted({setting.processes for setting in settings}):
        numbers = [i for i, setting in enumerate(settings) if setting.processes == processes]
        jobs = [asdict(settings[i]) for i in numbers]
        parts = run_job(
            _emulate_process, {"settings": jobs, "steps": steps}, processes, fork=True, timeout_seconds=3600
        )
        for position, i in enumerate(numbers):
            found[i] = [_whole(step) for step in zip(*(part[position] for part in parts), strict=True)]
        on_step(f"K = {processes}")
    return found


def _whole(parts: Sequence[Sequence[float]]) -> Step:
    """A step of all processes."""
    own = [_Part(*part) for part in parts]
    return Step(
        max(part.end for part in own) - min(part.start for part in own),
        sum(part.cpu_seconds for part in own),
        mean(part.late_seconds for part in own),
        mean(part.sending_seconds for part in own),
    )


def _emulate_process(job: Job) -> list[list[_Part]]:
    """One process's part of each step of each setting."""
    machine.wake_up_on_time()
    settings = [Emulated(**setting) for setting in job["settings"]]
    ready = [_Pipeline(setting, int(os.environ["RANK"])) for setting in settings]
    found: list[list[_Part]] = [[] for _ in settings]
    for step in range(job["steps"] + 1):
        for i in range(len(settings))[:: -1 if step % 2 else 1]:
            times: list[ActionTime] = []
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            ready[i].step(times)
            if step:  # the first one warms up
                end, cpu_seconds = time.perf_counter(), time.process_time() - cpu
                late = sum(_late_seconds(settings[i], one) for one in times)
                found[i].append(_Part(start, end, cpu_seconds, late, sum(one.sending for one in times)))
    return found


def _late_seconds(setting: Emulated, one: ActionTime) -> float:
    """By which an action took longer than it should."""
    forward, backward = setting.stage_seconds(one.action.stage)
    should = {ActionKind.FORWARD: forward, ActionKind.RECOMPUTE: forward, ActionKind.BACKWARD: backward}
    return one.end - one.start - one.waiting - one.sending - should.get(one.action.kind, 0.0)


class _Pipeline:
    """One process's stages, edges and executor."""

    def __init__(self, setting: Emulated, rank: int) -> None:
        self.table = setting.table()
        placement, device = self.table.placement, torch.device("cpu")
        own = dict.fromkeys(placement.stages_of(rank), device)
        topology = Topology(rank, placement.num_processes, (device,), placement, own)
        boundary = torch.zeros(setting.boundary_bytes // _FLOAT_BYTES)
        # The executor is typed for stages that compute.
        stages = {number: cast(Stage, WaitingStage(setting, number, boundary)) for number in own}
        self.executor = Executor(stages, connect(topology, lambda stage, name: boundary.dtype), rank)
        count = setting.micro_batches
        inputs: dict[str, Any] = {}
        self.micro_batches = [MicroBatch(i, inputs, 0, 1, count) for i in range(count)]

    def step(self, times: list[ActionTime]) -> None:
        times.extend(self.executor.run(self.table, self.micro_batches, is_measured=True).times)
