"""ZeRO-1: the replicas of a stage share the update of its parameters (Rajbhandari et al. 2020, arXiv 1910.02054, 5.1).

Each replica has the whole gradient, updates a shard of every parameter, and keeps the optimizer's state of that shard
alone. Then it sends the new values to the other replicas. A shard is a run of a parameter's elements, where the
optimizer treats each element by itself; otherwise the parameters are shared out whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job import wire
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.replicas import BUCKET_BYTES, Replicas, in_buckets, started

Slots: TypeAlias = dict[str, Any]
"""The state that an optimizer keeps of one parameter: tensors and numbers, by their names."""

#: Package and class of the optimizers whose update of an element depends on that element's history alone.
_BY_ELEMENT = {
    f"torch.{name}"
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
#: And of those that treat each parameter alone: rows and columns, or blocks of elements that are quantised together.
_BY_PARAMETER = {
    *("torch.Adafactor", "torch.Muon", "transformers.Adafactor"),
    *(f"bitsandbytes.{name}" for name in ("AdamW", "AdEMAMix", "Lion", "RMSprop")),
}


#: The setting of all this, for errors.
SETTING, NOT_SET = "zero is 1", "zero is 0; make the Pipeline with zero=1"


def treats_elements_alone(optimizer: torch.optim.Optimizer, needed_by: str = SETTING) -> bool:
    """Whether an optimizer treats each element by itself; otherwise each parameter by itself.

    Args:
        optimizer: of some parameters, which are not all updated in one call.
        needed_by: the setting that does so, for the error.

    Raises:
        UserError: neither is known of its class.
    """
    cls, name = type(optimizer), name_of(optimizer)
    if name in _BY_ELEMENT:
        return True
    if name in _BY_PARAMETER:
        return False
    known = ", ".join(sorted(_BY_ELEMENT | _BY_PARAMETER))
    raise UserError(
        f"{needed_by} and the optimizer is {cls.__module__}.{cls.__qualname__}, of which it is not known whether its "
        "update of a parameter depends on other parameters, which would not be updated with it: leave that setting "
        f"out, or use one of these classes: {known}"
    )


def treats_parameters_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known of an optimizer that its update of a parameter does not depend on other parameters."""
    return name_of(optimizer) in _BY_ELEMENT | _BY_PARAMETER


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Package and class of an optimizer."""
    # A subclass may do something else in a step.
    cls = type(optimizer)
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


class Shards:
    """The part of each parameter that each replica of this process's stages updates.

    Args:
        parameters: of this process that are trained, by name, in the model's order.
        owner_stage: the stage that each of them belongs to.
        by_element: whether a shard is a run of elements; otherwise it is a whole parameter or nothing.
        replicas: of these stages, for their process groups.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        owner_stage: Mapping[str, int],
        by_element: bool,
        replicas: Replicas,
        world: Mesh,
    ) -> None:
        self._parameters = parameters
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._world, self._replicas = world, replicas
        #: Names of the parameters of each stage that has replicas, in the order of stages, which all processes keep.
        self._names: dict[int, list[str]] = {}
        for stage, workers in enumerate(world.placement.workers):
            names = [name for name in parameters if owner_stage[name] == stage]
            if names and len(workers) > 1:
                self._names[stage] = names
        #: The ends of the shards of each parameter: replica i has the elements from ends[i] to ends[i + 1].
        self._ends: dict[str, list[int]] = {}
        self._index: dict[str, int] = {}
        for stage, names in self._names.items():
            ranks = world.replicas_of(stage)
            # A run of elements must be a view, so that its new values are those of the parameter.
            cut = [name for name in names if by_element and parameters[name].is_contiguous()]
            sizes = {name: parameters[name].numel() for name in names}
            self._ends |= _runs({name: sizes[name] for name in cut}, len(ranks))
            self._ends |= _wholes({name: sizes[name] for name in names if name not in cut}, len(ranks))
            self._index |= dict.fromkeys(names, ranks.index(world.rank))
        self._serves = False
        self._narrowed: list[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def are_like(self, other: Shards) -> bool:
        """Whether the other ones are cut in the same way."""
        return self._ends == other._ends

    def own(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """This replica's shard of a tensor of a parameter's shape: a view.

        Returns:
            (n,) for a run of n elements; all of the tensor, in its shape, where this replica has all; None where it has
            nothing.
        """
        if name not in self._ends:
            return tensor
        return self._part(name, tensor, self._index[name])

    def has_part(self, name: str) -> bool:
        """Whether this replica updates any of a parameter."""
        return name not in self._ends or self._index[name] in self._holders(name)

    def _holders(self, name: str) -> list[int]:
        """The replicas that update something of a parameter, by their number."""
        return [index for index, (start, stop) in enumerate(pairwise(self._ends[name])) if start < stop]

    def _part(self, name: str, tensor: torch.Tensor, index: int) -> torch.Tensor | None:
        start, stop = self._ends[name][index : index + 2]
        if start == stop:
            return None
        return tensor if stop - start == tensor.numel() else tensor.reshape(-1)[start:stop]

    def _pieces(self, names: Sequence[str], index: int) -> Iterator[torch.Tensor]:
        """A replica's shards of these parameters; a large one in pieces, so that messages are of like size."""
        for name in names:
            part = self._part(name, self._parameters[name].data, index)
            if part is not None:
                is_large = part.nbytes > BUCKET_BYTES and part.is_contiguous()
                yield from part.view(-1).split(BUCKET_BYTES // part.itemsize) if is_large else (part,)

    def _replicated(self) -> Iterator[tuple[list[str], tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]]]:
        """Yield (parameters, ranks of the replicas, groups for tensors and on the CPU) of each stage with replicas."""
        for stage, names in self._names.items():
            yield names, self._world.replicas_of(stage), self._replicas.groups_of(stage)

    # ------------------------------------------------------------------ a step

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every step of an optimizer of these parameters update this replica's shards, and share the new values.

        A second call does nothing.
        """
        if self._serves:
            return
        self._serves = True
        self.cut_state(optimizer, self._parameters)
        optimizer.register_step_pre_hook(self._narrow)
        optimizer.register_step_post_hook(self._widen)

    def _narrow(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let each parameter and its gradient be its shard, for the optimizer."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UserError(f"{SETTING} and step is given a closure, which it cannot run; call train_step before step")
        for name in self._ends:
            parameter = self._parameters[name]
            values, gradient = parameter.data, parameter.grad
            if gradient is None:
                continue
            self._narrowed.append((parameter, values, gradient))
            # Its gradient must always have its shape.
            parameter.grad = None
            if (shard := self.own(name, values)) is not None:
                parameter.data = shard
                parameter.grad = self.own(name, gradient)

    def _widen(self, *_: Any) -> None:
        for parameter, values, gradient in self._narrowed:
            parameter.grad = None
            parameter.data = values
            parameter.grad = gradient
        self._narrowed.clear()
        self.share_values()

    @torch.no_grad()
    def share_values(self) -> None:
        """Give every replica the values of all shards. All replicas of these stages must call it.

        Each of them sends a bucket at the same time, so that a link carries both of its directions.
        """
        for names, ranks, (group, _) in self._replicated():
            for buckets in zip_longest(*(in_buckets(self._pieces(names, index)) for index in range(len(ranks)))):
                sent = []
                for rank, bucket in zip(ranks, buckets, strict=True):
                    if bucket is not None:
                        flat = torch.cat([part.flatten() for part in bucket])
                        source = dist.get_group_rank(group, rank)
                        work = dist.broadcast(flat, group_src=source, group=group, async_op=True)
                        sent.append((rank, bucket, flat, work))
                for rank, bucket, flat, work in sent:
                    started(work).wait()
                    if rank != self._world.rank:
                        for part, values in zip(bucket, flat.split([part.numel() for part in bucket]), strict=True):
                            part.copy_(values.view_as(part))

    # ------------------------------------------------------------------ state

    def cut_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Keep what is of this replica's shards in the state that an optimizer made before its first step."""
        for name, parameter in parameters.items():
            slots = self.cut(name, optimizer.state.pop(parameter, {}))
            if slots:
                optimizer.state[parameter] = slots

    def cut(self, name: str, slots: Mapping[str, Any]) -> Slots:
        """The part of a whole parameter's state that the optimizer keeps of this shard; {} where it has none."""
        if not self.has_part(name):
            return {}
        own_slots = {}
        for slot, value in slots.items():
            own_slots[slot] = value
            if isinstance(value, torch.Tensor) and value.shape == self._shapes[name]:
                shard = self.own(name, value)
                assert shard is not None
                # A view would keep the whole tensor.
                own_slots[slot] = value if shard is value else shard.clone()
        return own_slots

    def gathered(self, states: Mapping[str, Slots]) -> dict[str, Slots]:
        """Put the state of each parameter together on the CPU, in the process that leads its stage.

        All replicas of these stages must call it.

        Args:
            states: of this replica's shards, by parameter.

        Returns:
            The state of whole parameters in their leader; for the other replicas of its stage there is none.
        """
        whole = {name: slots for name, slots in states.items() if name not in self._ends}
        for names, ranks, (_, group) in self._replicated():
            mine = {name: {slot: _kind(value) for slot, value in states.get(name, {}).items()} for name in names}
            kinds = [wire.from_plain(one, _Kinds) for one in wire.gather(wire.to_plain(mine, _Kinds), group)]
            for name in names:
                holders = self._holders(name)
                first = dist.get_group_rank(group, ranks[holders[0]])
                for slot, kind in kinds[first][name].items():
                    value = self._gather(name, states.get(name, {}).get(slot), kind, ranks, group)
                    if self._index[name] == 0:
                        whole.setdefault(name, {})[slot] = value
        return whole

    def _gather(self, name: str, own: Any, kind: Any, ranks: Sequence[int], group: dist.ProcessGroup) -> Any:
        """One slot of the state of a whole parameter, in the first of the ranks.

        Args:
            own: the value of this replica's shard, if it has one.
            kind: of the first shard's value, as `_kind` gives it.
        """
        if not isinstance(kind, _TensorKind):
            return kind
        holders, index = self._holders(name), self._index[name]
        start, stop = self._ends[name][holders[0] : holders[0] + 2]
        # Otherwise a value that all shards have alike, such as a count of steps.
        is_cut = len(holders) > 1 and kind.shape == (stop - start,)
        result = torch.empty(self._shapes[name] if is_cut else kind.shape, dtype=getattr(torch, kind.dtype))
        for holder in holders if is_cut else holders[:1]:
            if holder == index != 0:
                dist.send(own.detach().to("cpu").contiguous(), dst=ranks[0], group=group)
            if index != 0:
                continue
            part = self._part(name, result, holder) if is_cut else result
            assert part is not None, "this replica has a shard"
            if holder == 0:
                part.copy_(own)
            else:
                dist.recv(part, src=ranks[holder], group=group)
        return result


@dataclass(frozen=True)
class _TensorKind:
    """A tensor of an optimizer's state, as other processes need to know it."""

    shape: tuple[int, ...]
    dtype: str


#: What each parameter's slots have: tensors, or values that the shards have alike.
_Kinds: TypeAlias = dict[str, dict[str, _TensorKind | Any]]


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _TensorKind(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _runs(sizes: Mapping[str, int], count: int) -> dict[str, list[int]]:
    """Cut each parameter into `count` runs of elements of the same length, or one more."""
    return {name: [size * index // count for index in range(count + 1)] for name, size in sizes.items()}


def _wholes(sizes: Mapping[str, int], count: int) -> dict[str, list[int]]:
    """Give each parameter to one of `count` replicas, the largest ones first, always to the one that has least."""
    ends, loads = {}, [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        index = loads.index(min(loads))
        loads[index] += sizes[name]
        ends[name] = [0] * (index + 1) + [sizes[name]] * (count - index)
    return ends
