"""The replicas of a stage sum their gradients: the action G of a table.

Each replica has run its own micro-batches, and the loss of each is divided by the number of units in the whole
mini-batch. So the sum over the replicas, not the mean, is the gradient of the mini-batch. Gradients travel in buckets:
the first ones leave while the stage's last B or W still computes, the last ones at G.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from hf_gpipe.adapters import StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.ties import Ties
from hf_gpipe.schedule.table import Schedule

#: Gradients travel in messages of about this size: large ones use a link well, and the first ones leave early.
BUCKET_BYTES = 25 << 20

Parameters = list[torch.nn.Parameter]
Tensor = TypeVar("Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one type that are being summed, one after the other in a flat tensor."""

    parameters: Parameters
    flat: torch.Tensor
    work: dist.Work


class _Sum:
    """The sum of a stage's gradients in one step. All replicas start its buckets in the same order.

    Args:
        buckets: parameters whose gradients travel together.
        group: of the replicas, for gradients.
        incomplete: the parameters whose gradients the stage's last B or W adds to; None: it may be any.
    """

    def __init__(
        self,
        buckets: Sequence[Parameters],
        group: dist.ProcessGroup,
        incomplete: Collection[torch.nn.Parameter] | None = None,
    ) -> None:
        self._buckets, self._group = buckets, group
        self._number: dict[torch.Tensor, int] = {
            parameter: number for number, bucket in enumerate(buckets) for parameter in bucket
        }
        #: The number of gradients of each bucket that are not complete.
        self._missing = [sum(incomplete is None or p in incomplete for p in bucket) for bucket in buckets]
        self._started: list[_Bucket] = []
        self._has_gradient: list[bool] = []
        self._agreed: tuple[torch.Tensor, dist.Work] | None = None

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Context manager for the stage's last backward: a bucket starts as soon as its gradients are complete."""
        hooks = [parameter.register_post_accumulate_grad_hook(self.note) for parameter in self._number]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def start_rest(self, on_cpu: dist.ProcessGroup) -> None:
        """After the last backward, start the remaining buckets: some parameters may have no gradient to wait for."""
        while len(self._started) < len(self._buckets):
            self._start_next()
        flags = torch.tensor(self._has_gradient, dtype=torch.uint8)
        self._agreed = flags, started(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=on_cpu, async_op=True))

    def finish(self) -> None:
        """Wait for the sums and put them into `.grad`."""
        assert self._agreed is not None, "a sum that was begun in a backward was not started"
        flags, agreed = self._agreed
        agreed.wait()
        has_gradient = iter(flags.tolist())
        for bucket in self._started:
            bucket.work.wait()
            values = bucket.flat.split([p.numel() for p in bucket.parameters])
            for parameter, value in zip(bucket.parameters, values, strict=True):
                if next(has_gradient):
                    parameter.grad = value.view_as(parameter)

    def note(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete. The engine adds to it once in a backward."""
        number = self._number.get(parameter)
        if number is None:  # a tied parameter, whose gradients are summed before the update
            return
        assert number >= len(self._started), "a gradient was added to after it had been sent"
        self._missing[number] -= 1
        self.start_complete()

    def start_complete(self) -> None:
        """Start the next buckets as long as their gradients are complete."""
        while len(self._started) < len(self._buckets) and self._missing[len(self._started)] == 0:
            self._start_next()

    def _start_next(self) -> None:
        parameters = self._buckets[len(self._started)]
        self._has_gradient += [p.grad is not None for p in parameters]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        for parameter in parameters:
            # Its values are in the bucket now.
            parameter.grad = None
        self._started.append(
            _Bucket(parameters, flat, started(dist.all_reduce(flat, group=self._group, async_op=True)))
        )


class Replicas:
    """The stages of this process that have replicas in other processes. Every process must create it.

    Args:
        ties: sums the gradients of tied parameters over all their copies, replicas included.
    """

    def __init__(self, models: Mapping[int, StageModel], ties: Ties, world: Mesh) -> None:
        self._buckets: dict[int, list[Parameters]] = {}
        #: The groups of each stage: for gradients, and for what the host reads.
        self._groups: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        self._followed: Parameters = []
        self._sums: dict[int, _Sum] = {}
        groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        for workers in world.placement.groups:
            ranks = tuple(map(world.peer, workers))
            on_cpu = world.new_group(ranks, torch.device("cpu"))
            # Gradients of shared stages are in CPU memory.
            on_cuda = world.device.type == "cuda" and not world.placement.is_shared
            groups[workers] = world.new_group(ranks, world.device) if on_cuda else on_cpu, on_cpu
        self._world, self._models = world, models
        self._share_statistics()
        for stage, workers in enumerate(world.placement.workers):
            if stage not in models or len(workers) == 1:
                continue
            own = [(name, p) for name, p in models[stage].parameters.items() if p.requires_grad]
            # Stages can share a group, because all workers run the G of a table in the same order.
            self._groups[stage] = groups[workers]
            # From the last parameter on, whose gradient is complete first.
            self._buckets[stage] = list(in_buckets([p for name, p in reversed(own) if name not in ties.names]))
            self._followed += [p for name, p in own if not world.is_in_first_replica(ties.owner_stage[name])]

    def _share_statistics(self) -> None:
        """Connect the SyncBatchNorms of replicas, in groups of their own: gradients may be sent at the same time."""
        models = [model.adapter.reference for model in self._models.values()]
        if not any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in models[0].modules()):
            return
        for workers in self._world.placement.groups:
            ranks = tuple(map(self._world.peer, workers))
            group = self._world.new_group(ranks, self._world.device)
            for stage, own in enumerate(self._world.placement.workers):
                if own == workers and stage in self._models:
                    self._models[stage].batch_norms.gather = partial(_gathered, group, len(ranks))

    def check(self, schedule: Schedule, num_micro_batches: int) -> None:
        """Raise UserError where replicas whose SyncBatchNorms share statistics do not run the same actions."""
        placement = self._world.placement
        shared = [stage for stage, model in self._models.items() if model.batch_norms.gather is not None]
        for stage in shared:
            count = placement.replicas[stage]
            rows = {
                tuple(
                    (action.kind, action.stage, (action.micro_batch or 0) // count)
                    for action in schedule.actions[worker]
                )
                for worker in placement.workers[stage]
            }
            if num_micro_batches % count or len(set(placement.replicas)) > 1 or len(rows) > 1:
                raise UserError(
                    f"stage {stage} has SyncBatchNorm and {count} replicas, which normalise as many micro-batches "
                    f"together; a step has {num_micro_batches}, on stages of {list(placement.replicas)} replicas: give "
                    "every stage as many replicas, and every step a multiple of them in micro-batches"
                )

    def groups_of(self, stage: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The replicas of a stage of this process: their groups for tensors on its device, and on the CPU."""
        return self._groups[stage]

    def total(self, stage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor on the CPU over the replicas of a stage of this process, in place; all of them call it."""
        if stage in self._groups:
            dist.all_reduce(tensor, group=self._groups[stage][1])
        return tensor

    def begin(self) -> None:
        """Before a step, keep earlier steps' gradients, which are sums already, in the first replica alone."""
        for parameter in self._followed:
            parameter.grad = None

    @contextmanager
    def in_last_backward(self, stage: int) -> Iterator[None]:
        """Context manager for the last B of a stage: gradients that it completes travel while it goes on.

        The next G of this process must be that of the stage.
        """
        if not self._buckets[stage]:
            yield
            return
        self._sums[stage] = _Sum(self._buckets[stage], self._groups[stage][0])
        with self._sums[stage].in_backward():
            yield

    def before_last_weights(
        self, stage: int, incomplete: Collection[torch.nn.Parameter]
    ) -> Callable[[torch.nn.Parameter], None] | None:
        """Prepare the last W of a stage as `in_last_backward` prepares the last B.

        Args:
            incomplete: the parameters whose gradients this W adds to.

        Returns:
            A function to be called in W with each parameter once its gradient is complete; None: nothing travels.
        """
        if not self._buckets[stage]:
            return None
        self._sums[stage] = _Sum(self._buckets[stage], self._groups[stage][0], incomplete)
        self._sums[stage].start_complete()
        return self._sums[stage].note

    def start(self, stage: int) -> None:
        """Start to sum the gradients of a stage. They must not be used before `finish`."""
        if not self._buckets[stage]:
            return
        group, on_cpu = self._groups[stage]
        if stage not in self._sums:
            self._sums[stage] = _Sum(self._buckets[stage], group)
        self._sums[stage].start_rest(on_cpu)

    def finish(self, stage: int | None = None) -> None:
        """Wait for the sums and put them into `.grad`, which stays None if no replica has a gradient.

        Args:
            stage: the stage whose sums are waited for. None: all stages.
        """
        for number in list(self._sums) if stage is None else {stage} & self._sums.keys():
            self._sums.pop(number).finish()


def _gathered(group: dist.ProcessGroup, count: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all replicas, in the order of the replicas."""
    tensor = tensor.contiguous()
    copies = [torch.empty_like(tensor) for _ in range(count)]
    dist.all_gather(copies, tensor, group=group)
    return copies


def in_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of each type, in their order, in groups of about `BUCKET_BYTES`."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for some in by_type.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in some:
            bucket.append(tensor)
            size += tensor.nbytes
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
