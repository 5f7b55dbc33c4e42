"""Parameters that several stages use: one owner, summed gradients, counted once.

The stages on one device of a process share one tensor. Each other process or device has a copy, and the lowest stage
is the owner. At the update the copies' gradients are summed into the owner's, so that clipping, the optimizer and
checkpoints see the parameter once; before the next step the owner's new value goes to the copies. Where stages have
replicas, every replica has a copy, and those of the lowest stage are all owners, with the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from hf_gpipe.adapters import StageModel
from hf_gpipe.runtime.mesh import Mesh


class SharedParameters(Protocol):
    """Parameters and gradients in memory that all processes share, where a tied parameter has no copies."""

    def begin(self) -> None:
        """Before a step of training: put the gradients that `.grad` has, or none, into the memory."""

    def meet(self) -> None:
        """Wait until every process has updated its weights."""


@dataclass(frozen=True)
class _Tie:
    """A parameter with copies in several processes; `parameter` is the one of this process's lowest stage."""

    parameter: torch.nn.Parameter
    owners: tuple[int, ...]
    """The processes of the lowest stage, its leader first."""
    group: dist.ProcessGroup
    runs: tuple[tuple[int, int], ...] = ()
    """The runs of rows of all processes, where each has a part of the head alone; else empty."""
    own: tuple[int, int] | None = None
    """The run of rows of this process; None: it has the whole tensor."""

    def pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The messages about a tensor of the parameter's shape: views of it, and zeros in place of the rows that this
        process does not have."""
        if not self.runs:
            return [tensor]
        if self.own is None:
            return [tensor[start:stop] for start, stop in self.runs]
        return [
            tensor if run == self.own else tensor.new_zeros((run[1] - run[0], *tensor.shape[1:])) for run in self.runs
        ]


class Ties:
    """The shared parameters of a pipeline. Every process must create it, because all create the process groups.

    Args:
        shared: where the parameters are, if processes share their memory; None: each has its own.
    """

    def __init__(self, models: Mapping[int, StageModel], world: Mesh, shared: SharedParameters | None = None) -> None:
        self._shared = shared
        #: Parameters with a copy on another device of this process: (the lowest stage's, its copy).
        self._local_ties = [] if shared else share_within_process(models)
        self._rank = world.rank
        self._holds_values = self._copies_are_fresh = False
        mine = {
            stage: (str(model.device), {name: _rows_of(model, name) for name in model.parameters})
            for stage, model in models.items()
        }
        everyone = world.gather_objects(mine, dict[int, tuple[str, dict[str, tuple[int, int] | None]]])
        replicas = [world.replicas_of(stage) for stage in range(world.placement.num_stages)]
        holders: dict[str, list[int]] = {}
        runs: dict[str, dict[int, tuple[int, int]]] = {}
        for stage, own in enumerate(replicas):
            for name, run in everyone[own[0]][stage][1].items():
                holders.setdefault(name, []).append(stage)
                if run is not None:
                    runs.setdefault(name, {})[stage] = run
        #: The stages that have each parameter of the whole model.
        self.stages_of = dict(holders)
        #: Stage that owns each parameter of the whole model, or this process's part of it.
        self.owner_stage = {name: stages[0] for name, stages in holders.items()}
        for name, of_stages in runs.items():
            if len(of_stages) == len(holders[name]):  # nobody has the whole
                self.owner_stage[name] = next(stage for stage in of_stages if stage in models)
                del holders[name]
        #: Names of the parameters whose gradients this object sums over processes.
        self.names: set[str] = set()
        self._ties: list[_Tie] = []
        groups: dict[tuple[tuple[int, str], ...], dist.ProcessGroup] = {}
        for name in sorted(holders):
            lowest = {process: stage for stage in reversed(holders[name]) for process in replicas[stage]}
            if len(holders[name]) == 1 or len(lowest) == 1 or shared is not None:
                continue
            self.names.add(name)
            # NCCL has a communicator for each group and device. With one device of a process in a group, all its
            # members number the communicators alike.
            places = tuple((rank, everyone[rank][stage][0]) for rank, stage in sorted(lowest.items()))
            if places not in groups:
                ranks = [rank for rank, _ in places]
                groups[places] = world.new_group(ranks, torch.device(places[0][1]))
            if world.rank in lowest:
                owners = replicas[self.owner_stage[name]]
                stage, of_stages = lowest[world.rank], runs.get(name, {})
                parameter, own_run = models[stage].parameters[name], of_stages.get(stage)
                of_all = models[stage].division.rows(name)[1] if of_stages else ()
                self._ties.append(_Tie(parameter, owners, groups[places], of_all, own_run))

    def begin(self) -> None:
        """Before a step of training, move gradients of earlier steps to where this step adds its gradients."""
        if self._shared is not None:
            self._shared.begin()

    def leave_out(self, parameters: Set[torch.nn.Parameter]) -> None:
        """Leave out parameters that never change, whose copies need no refresh. Every process must call it alike."""
        self._ties = [tie for tie in self._ties if tie.parameter not in parameters]
        self._local_ties = [pair for pair in self._local_ties if pair[0] not in parameters]

    def reduce_gradients(self) -> None:
        """Sum the gradients of each tied parameter into its owners'; the copies then have no gradient."""
        for parameter, copy in self._local_ties:
            if copy.grad is not None:
                gradient = copy.grad.to(parameter.device)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                copy.grad = None
        for tie in self._ties:
            if not tie.parameter.requires_grad:
                continue
            if tie.parameter.grad is None:
                tie.parameter.grad = torch.zeros_like(tie.parameter)
            for piece in tie.pieces(tie.parameter.grad):
                if len(tie.owners) == 1:
                    dist.reduce(piece, dst=tie.owners[0], group=tie.group)
                else:
                    dist.all_reduce(piece, group=tie.group)
            if self._rank not in tie.owners:
                tie.parameter.grad = None

    @contextmanager
    def holding_values(self) -> Iterator[None]:
        """Context manager in which no parameter changes: copies get their owner's value once."""
        self._holds_values, self._copies_are_fresh = True, False
        try:
            yield
        finally:
            self._holds_values = False

    def refresh_copies(self) -> None:
        """Give every copy its owner's value, which anything may have changed since."""
        if self._holds_values and self._copies_are_fresh:
            return
        self._copies_are_fresh = True
        if self._shared is not None:
            self._shared.meet()
        for tie in self._ties:
            for piece in tie.pieces(tie.parameter.data):
                dist.broadcast(piece, src=tie.owners[0], group=tie.group)
        for parameter, copy in self._local_ties:
            copy.data.copy_(parameter.data)


def _rows_of(model: StageModel, name: str) -> tuple[int, int] | None:
    """The rows of a parameter that a process has, where it has a part; None: it has the whole."""
    return model.division.rows(name)[0]


def share_within_process(
    models: Mapping[int, StageModel],
) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """Let the stages on one device share the tensor of a parameter that several use.

    Returns:
        The copies on other devices: (the lowest stage's parameter, its copy).
    """
    first: dict[str, torch.nn.Parameter] = {}
    on_device: dict[tuple[str, torch.device], torch.nn.Parameter] = {}
    copies = []
    for stage in sorted(models):
        for name, parameter in list(models[stage].parameters.items()):
            shared = on_device.setdefault((name, models[stage].device), parameter)
            if shared is not parameter:
                models[stage].replace_parameter(name, shared)
            elif first.setdefault(name, parameter) is not parameter:
                copies.append((first[name], parameter))
    return copies
