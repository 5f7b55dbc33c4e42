"""Parameters that several stages use: one owner, summed gradients, counted once.

Inside a process the stages share one tensor. Between processes each has a copy: the process of the lowest stage is
the owner. At the update the copies' gradients are summed into the owner's, so that clipping, the optimizer and
checkpoints see the parameter once; before the next step the owner sends its new value to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_gpipe.adapters import StageModel
from hf_gpipe.runtime.topology import Topology


@dataclass(frozen=True)
class _Tie:
    """A parameter with copies in several processes; `parameter` is this process's."""

    parameter: torch.nn.Parameter
    owner: int
    group: dist.ProcessGroup


class Ties:
    """The shared parameters of a pipeline. Every process must create it, since process groups are made together.

    Args:
        models: the stages of this process, by number.
        topology: the processes.
    """

    def __init__(self, models: Mapping[int, StageModel], topology: Topology) -> None:
        share_within_process(models)
        names_of_stage: dict[int, tuple[str, ...]] = {}
        for part in topology.gather_objects({stage: tuple(model.parameters) for stage, model in models.items()}):
            names_of_stage.update(part)
        holders: dict[str, list[int]] = {}
        for stage in sorted(names_of_stage):
            for name in names_of_stage[stage]:
                holders.setdefault(name, []).append(stage)
        #: Stage that owns each parameter of the whole model.
        self.owner_stage = {name: stages[0] for name, stages in holders.items()}
        self._ties: list[_Tie] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        local = {name: parameter for model in models.values() for name, parameter in model.parameters.items()}
        for name in sorted(holders):
            ranks = tuple(sorted({topology.process_of(stage) for stage in holders[name]}))
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
            if topology.rank in ranks:
                owner = topology.process_of(self.owner_stage[name])
                self._ties.append(_Tie(local[name], owner, groups[ranks]))

    def reduce_gradients(self) -> None:
        """Sum each tie's gradients into its owner's; the other copies have none afterwards."""
        for tie in self._ties:
            if not tie.parameter.requires_grad:
                continue
            if tie.parameter.grad is None:
                tie.parameter.grad = torch.zeros_like(tie.parameter)
            dist.reduce(tie.parameter.grad, dst=tie.owner, group=tie.group)
            if tie.owner != dist.get_rank():
                tie.parameter.grad = None

    def send_values(self) -> None:
        """Give every copy its owner's value."""
        for tie in self._ties:
            dist.broadcast(tie.parameter.data, src=tie.owner, group=tie.group)


def share_within_process(models: Mapping[int, StageModel]) -> None:
    """Let stages of one process that use the same parameter hold the same tensor, the lowest stage's."""
    first: dict[str, torch.nn.Parameter] = {}
    for stage in sorted(models):
        for name, parameter in list(models[stage].parameters.items()):
            if first.setdefault(name, parameter) is not parameter:
                models[stage].replace_parameter(name, first[name])
