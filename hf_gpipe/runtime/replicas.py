"""The replicas of a stage sum their gradients: the action G of a table.

Each replica has run its own micro-batches, and the loss of each is divided by the number of units in the whole
mini-batch. So the sum over the replicas, not the mean, is the gradient of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_gpipe.adapters import StageModel
from hf_gpipe.runtime.ties import Ties
from hf_gpipe.runtime.topology import Topology

#: Gradients travel in messages of about this size: large ones use a link well, and the first ones leave early.
BUCKET_BYTES = 25 << 20

Parameters = list[torch.nn.Parameter]


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one type that are being summed, one after the other in a flat tensor."""

    parameters: Parameters
    flat: torch.Tensor
    work: dist.Work


@dataclass(frozen=True)
class _Pending:
    """The sum of a stage's gradients, under way."""

    buckets: list[_Bucket]
    has_gradient: torch.Tensor
    """For each parameter whether any replica has a gradient, on the CPU, once `agreed` has ended."""
    agreed: dist.Work


class Replicas:
    """The stages of this process that have replicas in other processes. Every process must create it.

    Args:
        models: the stages of this process, by number.
        ties: sums the gradients of tied parameters over all their copies, replicas included.
        topology: the processes.
    """

    def __init__(self, models: Mapping[int, StageModel], ties: Ties, topology: Topology) -> None:
        self._parameters: dict[int, Parameters] = {}
        #: For gradients, and for what the host reads.
        self._groups: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        self._followed: Parameters = []
        self._pending: dict[int, _Pending] = {}
        groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        for workers in topology.placement.groups:
            on_cpu = topology.new_group(workers, torch.device("cpu"))
            on_cuda = topology.device.type == "cuda"
            groups[workers] = topology.new_group(workers, topology.device) if on_cuda else on_cpu, on_cpu
        for stage, workers in enumerate(topology.placement.workers):
            if stage not in models or len(workers) == 1:
                continue
            own = [(name, p) for name, p in models[stage].parameters.items() if p.requires_grad]
            # Stages share a group: the G of a table stand in one order on all workers.
            self._groups[stage] = groups[workers]
            self._parameters[stage] = [p for name, p in own if name not in ties.names]
            self._followed += [p for name, p in own if not topology.leads(ties.owner_stage[name])]

    def groups_of(self, stage: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The replicas of a stage of this process: their groups for tensors on its device, and on the CPU."""
        return self._groups[stage]

    def begin(self) -> None:
        """Before a step: gradients of earlier steps, which are sums already, stay in the first replica alone."""
        for parameter in self._followed:
            parameter.grad = None

    def start(self, stage: int) -> None:
        """Start to sum the gradients of a stage. They must not be used before `finish`."""
        parameters, (group, on_cpu) = self._parameters[stage], self._groups[stage]
        if not parameters:
            return
        has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        agreed = _started(dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=on_cpu, async_op=True))
        buckets = []
        for some in _in_buckets(parameters):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in some])
            for parameter in some:
                # Its values are in the bucket now.
                parameter.grad = None
            buckets.append(_Bucket(some, flat, _started(dist.all_reduce(flat, group=group, async_op=True))))
        self._pending[stage] = _Pending(buckets, has_gradient, agreed)

    def finish(self) -> None:
        """Wait for the sums of all stages and put them into `.grad`. A parameter without gradient anywhere has none."""
        for stage, pending in self._pending.items():
            pending.agreed.wait()
            has_gradient = dict(zip(self._parameters[stage], pending.has_gradient.tolist(), strict=True))
            for bucket in pending.buckets:
                bucket.work.wait()
                values = bucket.flat.split([p.numel() for p in bucket.parameters])
                for parameter, value in zip(bucket.parameters, values, strict=True):
                    if has_gradient[parameter]:
                        parameter.grad = value.view_as(parameter)
        self._pending.clear()


def _in_buckets(parameters: Parameters) -> Iterator[Parameters]:
    """The parameters of each type in groups of about `BUCKET_BYTES`, from the last one, whose gradient comes first."""
    by_type: dict[torch.dtype, Parameters] = {}
    for parameter in reversed(parameters):
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for some in by_type.values():
        bucket: Parameters = []
        size = 0
        for parameter in some:
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not in the group"
    return work
