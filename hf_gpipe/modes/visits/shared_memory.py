"""The weights and gradients of shared stages: one place for each in CPU memory, which all workers share.

Each worker has a model of every stage, whose parameters are views of this memory between visits. The process that owns
a stage makes the memory of its parameters and updates them. Processes of one machine map the same memory. A weight that
several stages use is there once, on the lowest of them. A gradient is there for each stage, because two stages may add
at one time.

All processes meet twice in a step: before it begins, when no weight changes any more, and before its update, when all
gradients have arrived. Where stages are updated during backwards, each update waits for its own gradients instead.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.runtime.memory import ALIGNMENT, aligned, path_of, reserved_file
from hf_gpipe.runtime.mesh import Mesh

#: The folder whose files are memory that processes share.
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Gradient:
    """The memory of the gradient of a parameter in one stage.

    Attributes:
        value: of the parameter's shape.
        is_there: whether it has a value, (), uint8.
    """

    value: torch.Tensor
    is_there: torch.Tensor


class SharedMemory:
    """The memory of the weights and gradients of this process's pipeline. Every process creates it.

    Stages are added one after another, so that a process has the weights of one stage twice for a while, and no more.
    """

    def __init__(self, world: Mesh, *, is_pinned: bool = True) -> None:
        self._world = world
        self._is_pinned = is_pinned and world.device.type == "cuda"
        self._peers = world.placement.pipeline_of(world.worker)
        self._is_shared = len({world.placement.ranks_of(worker) for worker in self._peers}) > 1
        #: The event after which the gradients of a stage's last visit in this process are there, by stage, on CUDA.
        self.given: dict[int, torch.cuda.Event] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._gradients: dict[tuple[int, str], Gradient] = {}
        self._stages_of: dict[str, list[int]] = {}
        #: The parameters that this process updates, by stage and name.
        self._own: dict[tuple[int, str], nn.Parameter] = {}
        self._is_collected = False

    def add(self, stage: int, models: Mapping[int, StageModel]) -> None:
        """Move the weights of a stage to shared memory. Every process calls it, with the next stage.

        Args:
            models: of the stage, of each worker of this process.

        Raises:
            UserError: the machine has too little shared memory.
        """
        placement = self._world.placement
        first = next(iter(models.values()))
        moved: dict[str, torch.Tensor] = {}
        sizes: list[int] = []
        for name, parameter in first.parameters.items():
            self._stages_of.setdefault(name, []).append(stage)
            is_new = name not in self._weights
            if is_new and (parameter.requires_grad or not _is_mapped(parameter.data)):
                moved[name] = parameter.data
                sizes.append(aligned(parameter.nbytes))
            if parameter.requires_grad:
                sizes.append(aligned(parameter.nbytes) + ALIGNMENT)
        owner = next(own for own in placement.workers[stage] if own in self._peers)
        memory = self._memory(sum(sizes), placement.ranks_of(owner)[0])
        is_owner, start = owner in self._world.workers, 0

        def piece(size: int) -> torch.Tensor:
            nonlocal start
            start += aligned(size)
            return memory[start - aligned(size) :][:size]

        for name, parameter in first.parameters.items():
            if name in moved:
                value = moved[name]
                place = piece(value.nbytes).view(value.dtype).view(value.shape)
                if is_owner:
                    place.copy_(value)
                self._weights[name] = place
            elif name not in self._weights and not self._is_shared:
                self._weights[name] = parameter.data
            if parameter.requires_grad:
                value = piece(parameter.nbytes).view(parameter.dtype).view(parameter.shape)
                self._gradients[stage, name] = Gradient(value, piece(1)[0])
                self._gradients[stage, name].is_there.zero_()
        for worker, model in models.items():
            for name, parameter in model.parameters.items():
                if name in self._weights:
                    parameter.data = self._weights[name]
                if worker == owner and parameter.requires_grad:
                    self._own[stage, name] = parameter

    def gradients(self, stage: int, model: StageModel) -> dict[nn.Parameter, Gradient]:
        """The memory of the gradients of a stage, by the parameters of one of its models."""
        return {p: self._gradients[stage, n] for n, p in model.parameters.items() if p.requires_grad}

    def begin(self) -> None:
        """Before a step of training: put the gradients that `.grad` has, or none, into shared memory."""
        self._is_collected = False
        for (stage, name), parameter in self._own.items():
            place, gradient = self._gradients[stage, name], parameter.grad
            parameter.grad = None
            if stage != self._stages_of[name][0]:
                # The process that updates the weight may still read it, for the step before.
                continue
            if gradient is not None and gradient.data_ptr() != place.value.data_ptr():
                place.value.copy_(gradient)
            place.is_there.fill_(gradient is not None)
            for other in self._stages_of[name][1:]:
                self._gradients[other, name].is_there.zero_()

    def collect(self) -> None:
        """Once the gradients of this process's visits are there: wait until those of all are, and give them to the
        parameters that this process updates. Later calls in the same step do nothing."""
        if self._is_collected:
            return
        self._is_collected = True
        self._world.barrier()
        for stage in {stage: None for stage, _ in self._own}:
            self._give(stage)

    def collect_stage(self, stage: int) -> None:
        """Collect the gradients of a stage that this process updates, once they and those of all later stages are
        there. In such a step every process collects each of its stages so."""
        self._is_collected = True
        self._give(stage)

    def _give(self, stage: int) -> None:
        """Give a stage's parameters their gradients; those of tied ones are added up in the lowest stage."""
        for (owner, name), parameter in self._own.items():
            stages, place = self._stages_of[name], self._gradients[owner, name]
            if owner != stage or stage != stages[0]:
                continue
            for other in stages[1:]:
                more = self._gradients[other, name]
                if not more.is_there:
                    continue
                if place.is_there:
                    place.value.add_(more.value)
                else:
                    place.value.copy_(more.value)
                    place.is_there.fill_(1)
            parameter.grad = place.value if place.is_there else None

    def meet(self) -> None:
        """Wait until every process has updated its weights."""
        self._world.barrier()

    def _memory(self, size: int, owner: int) -> torch.Tensor:
        """CPU memory, which the processes of the pipeline share where there are several."""
        if not self._is_shared:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        size = max(size, mmap.PAGESIZE)
        file = _SharedFile(size) if owner == self._world.rank else None
        try:
            told = (size, "", (0, 0), "") if file is None else (size, file.path, file.identity, file.problem)
            every = self._world.gather_objects(told)
            _check_sizes([facts[0] for facts in every], self._world.rank, owner)
            _, path, identity, problem = every[owner]
            if problem:
                raise UserError(problem)
            if _identity(path) != identity:
                raise UserError(
                    f"stages are shared by several processes, and process {self._world.rank} does not see memory of "
                    f"process {owner} as {path}: start all processes of a machine in one container, by one user, or "
                    "use one process with several devices"
                )
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            self._world.barrier()
        finally:
            if file is not None:
                file.close()
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        return memory


class _SharedFile:
    """A file in shared memory for the processes of a machine.

    Attributes:
        path: under which other processes open it until `close`.
        identity: of the file.
        problem: why there is none; else "".
    """

    def __init__(self, size: int) -> None:
        self.path, self.identity, self.problem, self._file = "", (0, 0), "", None
        try:
            self._file = reserved_file(_SHARED_MEMORY, size)
        except OSError as error:
            self.problem = f"stages are shared by several processes, which share memory in {_SHARED_MEMORY}: {error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.problem = (
                    f"stages are shared by several processes, and {_SHARED_MEMORY} has no room for {size} bytes more "
                    f"({error.strerror}); enlarge it (docker: --shm-size, or mount -o remount,size=...), or use one "
                    "process with several devices"
                )
            return
        self.path = path_of(self._file)
        self.identity = _identity(self.path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _identity(path: str) -> tuple[int, int]:
    """Device and number of a file; (0, 0): there is none, or this process may not see it."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def _check_sizes(sizes: Sequence[int], rank: int, owner: int) -> None:
    """Raise UserError where a process would divide shared memory otherwise than the process that makes it."""
    if sizes[rank] != sizes[owner]:
        raise UserError(
            f"stages are shared by several processes, and process {rank} has {sizes[rank]} bytes of a stage to share "
            f"where process {owner} has {sizes[owner]}: one maps the weights from a file, and the other does not; "
            "give every process the model in one way, such as the directory of one checkpoint"
        )


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU is a mapped file, whose memory all processes share that map it."""
    maps = Path("/proc/self/maps")
    if tensor.device.type != "cpu" or not maps.exists():
        return False
    address = tensor.data_ptr()
    for line in maps.read_text().splitlines():
        ends, _, _, _, inode, *_ = line.split()
        low, high = (int(end, 16) for end in ends.split("-"))
        if low <= address < high:
            return inode != "0"
    return False
