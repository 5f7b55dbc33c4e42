"""The world of a pipeline: the facts of its ranks, their roles, devices and stages, and all that they tell each other
outside of a step's table.

The default group of torch.distributed may be the user's, on any backend and with messages of its own. So the processes
talk over groups of their own: gloo for CPU tensors and values (wire.py), NCCL for CUDA tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
import torch.distributed as dist

from hf_gpipe.adapters.tensor_parallel.ranks import ProcessRanks
from hf_gpipe.errors import UserError
from hf_gpipe.job import wire
from hf_gpipe.job.facts import DeviceFacts, RankFacts
from hf_gpipe.job.job import Job
from hf_gpipe.job.waiting import working
from hf_gpipe.recipe import Division
from hf_gpipe.schedule.placement import Placement

Value = TypeVar("Value")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MeasuredLink:
    """The link between two machines, or between two processes of one.

    Attributes:
        hosts: the names of the machines.
        ranks: the two processes that have measured it.
        bytes_per_second: in one direction.
        latency_seconds: of a small message.
    """

    hosts: tuple[str, str]
    ranks: tuple[int, int]
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class World:
    """The processes of a pipeline, as seen by this process; they are numbered by their rank.

    Three roles belong to one process each. Today all three are rank 0's, the main process.
    """

    reader: ClassVar[int] = 0
    """The rank that reads the data, and whose arguments and decisions count for all."""
    writer: ClassVar[int] = 0
    """The rank that makes directories, and writes each file that is not of one stage alone."""
    reporter: ClassVar[int] = 0
    """The rank that shows progress and prints messages."""

    rank: int
    ranks: tuple[RankFacts, ...]
    """The facts of each process."""
    thread: str = field(default="", kw_only=True)
    """Name of the thread that sends messages here, if it is not the main one: each thread needs groups of its own."""

    stages_placed: Placement | None = field(default=None, kw_only=True)
    """The places of the stages, once a pipeline has placed them; None before."""
    links: dict[frozenset[str], MeasuredLink] = field(default_factory=dict, kw_only=True, compare=False)
    """The measured links between machines, by the machines' names."""

    @classmethod
    def of_job(cls) -> World:
        """The processes of the running job, on the CPU. Without torch.distributed there is one, number 0.

        The first call, by every process, may exchange their facts (`Job.ranks`).
        """
        if not dist.is_initialized():
            return cls(0, (RankFacts.of_this_process(),))
        return cls(dist.get_rank(), Job.current().ranks())

    def on(self, devices: Sequence[str]) -> Self:
        """Put this process on these devices. Every process calls it with its own devices, and gets the new world."""
        mine = tuple(DeviceFacts.of(torch.device(name)) for name in devices)
        everyone = zip(self.ranks, self.gather_objects(mine), strict=True)
        return replace(self, ranks=tuple(replace(rank, devices=own) for rank, own in everyone))

    # ------------------------------------------------------------------ facts

    @property
    def num_processes(self) -> int:
        return len(self.ranks)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each process's machine."""
        return tuple(rank.host for rank in self.ranks)

    @property
    def has_several_machines(self) -> bool:
        return len(set(self.hosts)) > 1

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of the processes on this machine, this one among them."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this process, in order."""
        return tuple(torch.device(device.name) for device in self.ranks[self.rank].devices) or (_CPU,)

    @property
    def device_models(self) -> tuple[str, ...]:
        """The models of the GPUs of all processes, such as "NVIDIA H100"; "" is a CPU."""
        return tuple(sorted({device.model for rank in self.ranks for device in rank.devices}))

    @property
    def device(self) -> torch.device:
        """This process's first device, for computations outside of the stages."""
        return self.devices[0]

    def for_thread(self, name: str) -> Self:
        """A world for a thread of this name, which sends messages while the main thread sends others."""
        return replace(self, thread=name)

    # ------------------------------------------------------------------ stages

    def placed(self, placement: Placement) -> Self:
        """The world of a pipeline whose stages are placed so.

        The stages of a process are spread over its devices, consecutive ones together. The result's placement names the
        devices of all stages, if a process has several.

        Raises:
            UserError: a process has more devices than stages, or several and shares its stages with other ranks.
        """
        if placement.ranks_per_worker > 1 and (several := [other for other in self.ranks if len(other.devices) > 1]):
            raise UserError(
                f"{Division(placement.ranks_per_worker).text} and a process has several devices "
                f"({', '.join(device.name for device in several[0].devices)}); give each process one device, and start "
                "more processes"
            )
        if placement.is_dealt:
            return self._dealt(placement)
        names: dict[tuple[int, int], str] = {}
        for worker in range(placement.num_processes):
            stages, (rank, *_) = placement.stages_of(worker), placement.ranks_of(worker)
            given = [device.name for device in self.ranks[rank].devices] or [str(_CPU)]
            if len(given) > len(stages):
                raise UserError(
                    f"process {rank} has {len(given)} devices for {len(stages)} stages: {', '.join(given)}; name at "
                    "most one for each stage"
                )
            names.update({(stage, worker): given[i * len(given) // len(stages)] for i, stage in enumerate(stages)})
        if any(len(rank.devices) > 1 for rank in self.ranks):
            placement = replace(placement, devices=tuple(names[place] for place in placement.places))
        return replace(self, stages_placed=placement)

    def _dealt(self, placement: Placement) -> Self:
        """The world of a pipeline whose stages are dealt to its devices: of a process with several, each is a worker.

        Raises:
            UserError: the processes of a pipeline are on several machines, or have different numbers of devices.
        """
        counts = {max(1, len(rank.devices)) for rank in self.ranks}
        if len(counts) > 1:
            raise UserError(
                f"stages are dealt to processes with {' and '.join(map(str, sorted(counts)))} devices; give each "
                "process as many"
            )
        (each,) = counts
        if each > 1:
            own = [[worker * each for worker in workers] for workers in placement.workers]
            # The stages of a process are updated in turn by its devices' workers.
            turns = [sum(earlier == workers for earlier in own[:stage]) % each for stage, workers in enumerate(own)]
            spread = [[first + turn for first in workers] for workers, turn in zip(own, turns, strict=True)]
            if {worker for workers in spread for worker in workers} != set(range(each * placement.num_processes)):
                raise UserError(
                    f"{placement.num_stages} stages are dealt to {each} devices of each of {placement.num_processes} "
                    "processes, and each updates one at least; give more stages, or fewer devices"
                )
            devices = [device.name for rank in self.ranks for device in rank.devices]
            placement = Placement(spread, devices, is_dealt=True, workers_per_rank=each)
        for crew in placement.crews:
            hosts = {self.hosts[rank] for worker in crew for rank in placement.ranks_of(worker)}
            if len(hosts) > 1:
                raise UserError(
                    f"the stages of a pipeline are dealt to processes on {' and '.join(sorted(hosts))}, which share no "
                    "memory; use replicas, one for each machine, or another schedule, such as breadth_first"
                )
        return replace(self, stages_placed=placement)

    @property
    def placement(self) -> Placement:
        """The workers of each stage, and its devices where a process has several."""
        assert self.stages_placed is not None, "the stages are placed"
        return self.stages_placed

    @cached_property
    def worker(self) -> int:
        """The worker that this process belongs to: it runs the worker's row of a table."""
        return self.placement.worker_with(self.rank)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The workers whose rows this process runs: `worker`, and where stages are dealt one for each device."""
        return self.placement.workers_with(self.rank)

    def device_of(self, worker: int, stage: int) -> torch.device:
        """The device on which one of this process's workers runs a stage."""
        name = self.placement.device_of(stage, worker)
        return self.device if name is None else torch.device(name)

    def peer(self, worker: int) -> int:
        """The rank that stands for this one in another worker: their messages go there."""
        return self.placement.ranks_of(worker)[self.place]

    @cached_property
    def place(self) -> int:
        """This process's place among the ranks of its worker."""
        return self.placement.ranks_of(self.worker).index(self.rank)

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that stand for this one in the replicas of a stage."""
        return tuple(map(self.peer, self.placement.workers[stage]))

    @cached_property
    def own_workers(self) -> Mapping[int, int]:
        """The worker of each stage of this process, by stage, ascending."""
        return dict(sorted((stage, worker) for worker in self.workers for stage in self.placement.stages_of(worker)))

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of this process, ascending."""
        return tuple(self.own_workers)

    @cached_property
    def stage_devices(self) -> Mapping[int, torch.device]:
        """The device of each of this process's stages."""
        return {stage: self.device_of(worker, stage) for stage, worker in self.own_workers.items()}

    def leader_of(self, stage: int) -> int:
        """The first process of the stage's first replica: it writes the stage's files."""
        return self.placement.ranks_of(self.placement.workers[stage][0])[0]

    def leads(self, stage: int) -> bool:
        """Whether this process is the leader of a stage."""
        return self.leader_of(stage) == self.rank

    def is_in_first_replica(self, stage: int) -> bool:
        """Whether this process has the stage's first replica, or a part of it: its parameters count once."""
        return self.placement.workers[stage][0] in self.workers

    # ------------------------------------------------------------------ roles

    @property
    def is_reader(self) -> bool:
        return self.rank == self.reader

    @property
    def is_writer(self) -> bool:
        return self.rank == self.writer

    @property
    def is_reporter(self) -> bool:
        return self.rank == self.reporter

    def from_reader(self, function: Callable[[], Value], *, takes_long: bool = False) -> Value:
        """Call `function` in the reader only and return its value on every process.

        Args:
            function: returns a small value.
            takes_long: whether it may take longer than a message may, such as reading a corpus: the others wait as long
                as the reader is there.

        Raises:
            UserError: on every process, if `function` raises it in the reader.
        """
        return self._from(self.reader, function, takes_long)

    def from_writer(self, function: Callable[[], Value], *, takes_long: bool = False) -> Value:
        """`from_reader` for the writer."""
        return self._from(self.writer, function, takes_long)

    def _from(self, rank: int, function: Callable[[], Value], takes_long: bool = False) -> Value:
        outcomes = self.from_each(lambda: function() if self.rank == rank else None, takes_long=takes_long)
        return cast(Value, outcomes[rank])

    def from_each(self, function: Callable[[], Value], *, takes_long: bool = False) -> list[Value]:
        """Call `function` in every process; its values, in order of rank, on every process. Raises as `from_reader`."""
        outcome: Any = None
        with self.working() if takes_long else nullcontext():
            try:
                outcome = function()
            except UserError as error:
                outcome = error
        # Gathered, not broadcast: no process goes on before all are here.
        everyone = self.gather_objects(outcome)
        for rank, told in enumerate(everyone):
            if isinstance(told, UserError):
                raise outcome if self.rank == rank else told
        return everyone

    def working(self, limits: float = math.inf) -> AbstractContextManager[None]:
        """Context manager in which each process may work for longer than a message may take; it ends when all have.

        Every process must enter it; one that has nothing to do waits, as long as the others are there.

        Args:
            limits: how many of the job's time limits a process that is done waits for the others.
        """
        if self.num_processes == 1:
            return nullcontext()
        group = self.for_thread(f"waiting {self.thread}").group_on(_CPU)
        return working(group, Job.current().limit, limits)

    # ------------------------------------------------------------------ messages, which every process must take part in

    def barrier(self) -> None:
        """Wait until every process of the pipeline has called this method."""
        if self.num_processes > 1:
            dist.barrier(group=self.group_on(_CPU))

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> dist.Work | None:
        """Send the values of `tensor` in the process `src` into the tensor of every process.

        Args:
            tensor: of the same shape and type in every process; on the CPU, or on each process's first device.
            src: a rank.
            async_op: whether to return a handle at once, whose `wait` ends the operation; None with one process.
        """
        if self.num_processes == 1:
            return None
        return dist.broadcast(tensor, group_src=src, group=self.group_on(tensor.device), async_op=async_op)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Replace `tensor` by its sum over all processes, or by the result of another `op`, and return it."""
        if self.num_processes > 1:
            dist.all_reduce(tensor, op=op, group=self.group_on(tensor.device))
        return tensor

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`all_reduce` that does not wait for the other processes.

        Returns:
            To be called for the sum, any number of times; the first call waits until every process has begun.
        """
        work = None
        if self.num_processes > 1:
            work = dist.all_reduce(tensor, group=self.group_on(tensor.device), async_op=True)

        def end() -> torch.Tensor:
            if work is not None:
                work.wait()
            return tensor

        return end

    def gather_objects(self, value: Value) -> list[Value]:
        """Gather a small value of every process, in order of rank, on every process.

        Raises:
            UserError: on every process: the value of one of them is of a type that does not travel (wire.py).
        """
        return [value] if self.num_processes == 1 else wire.gather(value, self.group_on(_CPU))

    def gather_at_first(self, value: Value, ranks: Sequence[int]) -> list[Value] | None:
        """Gather a value of some processes in the first of them, in the order of `ranks`; None elsewhere.

        Only these processes take part in it.
        """
        first, *others = ranks
        if self.rank == first:
            return [value, *(wire.receive(rank, self.group_on(_CPU)) for rank in others)]
        if self.rank in others:
            wire.send(value, first, self.group_on(_CPU))
        return None

    def broadcast_value(self, value: Value, src: int) -> Value:
        """The value of the process `src`, on every process. Raises as `gather_objects`."""
        return self._from(src, lambda: value)

    # ------------------------------------------------------------------ groups

    def group_on(self, device: torch.device) -> dist.ProcessGroup:
        """The group of all processes for tensors on a kind of device. The first call, by every process, creates it."""
        return Job.current().common_group(_backend(device), self.thread)

    def new_group(self, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
        """Create a group of some processes for tensors on a kind of device. Every process must call it.

        Args:
            ranks: of several workers, those that stand for this one. Those at each other place form a group as well.
            device: of the tensors.
        """
        groups = [
            Job.current().new_group([rank - self.place + place for rank in ranks], _backend(device))
            for place in range(self.placement.ranks_per_worker)
        ]
        return groups[self.place]

    def ranks_of_workers(self, division: Division) -> ProcessRanks | None:
        """`worker_ranks` where layers are divided so, before any stage is placed."""
        if division.is_whole:
            return None
        count = division.workers_among(self.num_processes)
        return self.placed(division.placed(Placement.spread(count, count))).worker_ranks(division)

    def worker_ranks(self, division: Division) -> ProcessRanks | None:
        """The ranks of this process's worker, whose layers are divided so; None: it is the only one. Every process must
        call it."""
        if self.placement.ranks_per_worker == 1:
            return None
        groups = [
            Job.current().new_group(self.placement.ranks_of(worker), _backend(self.device))
            for worker in range(self.placement.num_processes)
        ]
        return ProcessRanks(division, self.place, groups[self.worker], self.device)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
