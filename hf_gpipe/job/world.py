"""The processes of a job: their facts, their roles, and all that they tell each other outside of a step's table.

The default group of torch.distributed may be the user's, on any backend and with messages of its own. So the processes
talk over groups of their own: gloo for CPU tensors and values (wire.py), NCCL for CUDA tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
import torch.distributed as dist

from hf_gpipe.errors import UserError, error_of_data, error_to_data
from hf_gpipe.job import wire
from hf_gpipe.job.facts import DeviceFacts, RankFacts
from hf_gpipe.job.job import Job

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
    """The processes of a job, as seen by this process; they are numbered by their rank.

    The main process reads the data, its arguments and decisions count for all, and it writes each file that is not of
    one stage alone, shows progress and prints messages.
    """

    main: ClassVar[int] = 0
    """The rank of the main process."""

    rank: int
    ranks: tuple[RankFacts, ...]
    """The facts of each process."""
    thread: str = field(default="", kw_only=True)
    """Name of the thread that sends messages here, if it is not the main one: each thread needs groups of its own."""
    links: dict[frozenset[str], MeasuredLink] = field(default_factory=dict, kw_only=True, compare=False)
    """The measured links between machines, by the machines' names."""

    @classmethod
    def current(cls) -> World:
        """The processes of the running job, on the CPU. Without torch.distributed there is one, number 0.

        The first call, by every process, may exchange their facts (`Job.ranks`).
        """
        if not dist.is_initialized():
            return cls(0, (RankFacts.current(),))
        return cls(dist.get_rank(), Job.current().ranks())

    def on(self, devices: Sequence[str]) -> Self:
        """Put this process on these devices. Every process calls it with its own devices, and gets the new world."""
        mine = tuple(DeviceFacts.of(torch.device(name)) for name in devices)
        everyone = zip(self.ranks, self.gather_objects(mine, tuple[DeviceFacts, ...]), strict=True)
        return replace(self, ranks=tuple(replace(rank, devices=own) for rank, own in everyone))

    @property
    def job(self) -> Job:
        """The job of this process."""
        return Job.current()

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

    # ------------------------------------------------------------------ the main process

    @property
    def is_main(self) -> bool:
        return self.rank == self.main

    def from_main(self, function: Callable[[], Value], kind: Any = None, *, takes_long: bool = False) -> Value:
        """Call `function` in the main process only and return its value on every process.

        Args:
            function: returns a small value.
            kind: the type of the value, such as a dataclass; None: it is one that travels as it is (wire.py).
            takes_long: whether it may take longer than a message may, such as reading a corpus: the others wait as long
                as the main process is there.

        Raises:
            UserError: on every process, if `function` raises it in the main process.
        """
        return self._from(self.main, function, kind, takes_long)

    def _from(self, rank: int, function: Callable[[], Value], kind: Any = None, takes_long: bool = False) -> Value:
        kind = None if kind is None else kind | None
        outcomes = self.from_each(lambda: function() if self.rank == rank else None, kind, takes_long=takes_long)
        return cast(Value, outcomes[rank])

    def from_each(
        self, function: Callable[[], Value], kind: Any = None, *, takes_long: bool = False, limits: float = math.inf
    ) -> list[Value]:
        """Call `function` in every process; its values, in order of rank, on every process. Raises as `from_main`.

        Of functions that take long, `limits` are how many time limits of a message a process waits for the others.
        """
        mine: Any = None
        error: UserError | None = None
        with self.working(limits) if takes_long else nullcontext():
            try:
                mine = function()
            except UserError as caught:
                error = caught
        if self.num_processes == 1:
            if error is not None:
                raise error
            return [mine]
        plain = None if error is not None or kind is None else wire.to_plain(mine, kind)
        # Gathered, not broadcast: no process goes on before all are here.
        everyone: Any = self.gather_objects(
            (mine if kind is None else plain, None if error is None else error_to_data(error))
        )
        for rank, (_, problem) in enumerate(everyone):
            if problem is not None:
                raise error if self.rank == rank and error is not None else error_of_data(*problem)
        return [value if kind is None else wire.from_plain(value, kind) for value, _ in everyone]

    @contextmanager
    def working(self, limits: float = math.inf) -> Iterator[None]:
        """Context manager in which each process may work for longer than a message may take; it ends when all have.

        Every process must enter it; one that has nothing to do waits, as long as the others are there.

        Args:
            limits: how many of the job's time limits a process that is done waits for the others.
        """
        if self.num_processes > 1:
            self.job.waiting_group(self.thread)
        yield
        if self.num_processes > 1:
            longest = limits * self.job.limit.total_seconds()
            self.job.wait_for_all("the work of all processes", longest, self.thread)

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

    def gather_objects(self, value: Value, kind: Any = None) -> list[Value]:
        """Gather a small value of every process, in order of rank, on every process.

        Raises:
            UserError: on every process: the value of one of them is of a type that does not travel (wire.py).
            MessageError: the value of another process is not of the type `kind`.
        """
        if self.num_processes == 1:
            return [value]
        if kind is None:
            return wire.gather(value, self.group_on(_CPU))
        everyone = wire.gather(wire.to_plain(value, kind), self.group_on(_CPU))
        return [wire.from_plain(one, kind) for one in everyone]

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
        return self.job.common_group(backend_of(device), self.thread)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
