"""The mesh of `pipeline`: the replicas of each stage, their processes and placement, and what replicas share."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline.division import DivisionKeys
from hf_gpipe.recipe.pipeline.stages import ASYNCHRONOUS, AUTO, Listed
from hf_gpipe.recipe.section import Count, NotWith, OneOf, Text, section
from hf_gpipe.schedule import DEALT, Placement, Schedule, is_table_file, placement_for, replicas_of
from hf_gpipe.schedule.actions import parse_number

#: Beside a mesh that the planner has chosen, where `zero` 1 is asked.
UNSHARED = "zero 0 (no stage has replicas)"


@section(kw_only=False)
class MeshKeys(DivisionKeys):
    """The replicas of each stage, and the processes that hold them."""

    replicas: Annotated[Count | Annotated[str, OneOf((AUTO,))] | tuple[Count, ...], Listed] = 1
    """Number of replicas of each stage, which take the micro-batches in turn and add up their gradients: 2 is two
    pipelines side by side. Or a list with one number per stage, such as [2, 1]; auto: the planner chooses for the
    number of processes."""

    placement: Text | None = None
    """The processes of each stage, with commas between its replicas, such as "0,2 1,3" for two stages with two
    replicas. null: the processes of a pipeline follow each other; if `replicas` is a list of different numbers, those
    of a stage do."""

    zero: Annotated[
        Literal[0, 1],
        NotWith(
            (ASYNCHRONOUS,),
            ": replicas share the whole step of an optimizer, and here each stage updates by itself",
        ),
    ] = 0
    """1: each replica of a stage keeps only a part of the optimizer's state and of float32 master weights, updates this
    part of the weights, and gets the rest from the other replicas (ZeRO-1); 0: each replica keeps and updates
    everything. With `replicas: auto`, 1 has an effect if the planner chooses replicas."""

    num_processes: Count | None = None
    """Number of processes that share the stages; null: one per replica of a stage, but at most one per GPU, or one for
    each of `devices`; with `replicas` or `num_stages` auto one per GPU."""

    def check(self) -> None:
        super().check()
        if self.is_mesh_open:
            self._check_open_mesh()
        else:
            self._check_mesh()

    def _check_mesh(self) -> None:
        """Raise UserError where stages, replicas, placement and processes do not fit each other."""
        num_stages, replicas = self.mesh
        replicas_of(num_stages, replicas)
        if self.num_processes is not None and self.num_processes > self.places:
            raise UserError(
                f"num_processes is {self.num_processes} and num_stages is {num_stages}; a process without a stage "
                "has nothing to do: use at most as many processes as stages, or more replicas."
            )
        if self.zero and self.places == num_stages:
            raise UserError(
                f"zero is {self.zero} and replicas is {replicas}: no stage has replicas that could share its "
                "optimizer's state; use zero 0, or at least 2 replicas of a stage."
            )
        if self.placement is not None and is_table_file(self.schedule):
            raise UserError(f"placement is {self.placement!r} and {self.schedule} has a placement; leave it out.")
        has_order = self.places > num_stages or self.placement is not None
        if self.num_processes is not None and has_order and not is_table_file(self.schedule):
            self.placed("gpipe")

    def _check_open_mesh(self) -> None:
        """Raise UserError where something says how many stages or replicas there are, and the planner is to choose."""
        open_names = [name for name in ("num_stages", "replicas") if getattr(self, name) == AUTO]
        lists = [name for name in ("partition", "recompute", "replicas") if isinstance(getattr(self, name), tuple)]
        if self.num_stages == AUTO and lists:
            raise UserError(
                f"num_stages is auto and {lists[0]} is a list with one entry per stage; give num_stages, or let "
                f"{lists[0]} be auto."
            )
        if self.placement is not None or is_table_file(self.schedule):
            given = "placement" if self.placement is not None else "the table"
            raise UserError(
                f"{open_names[0]} is auto, and {given} says how many stages and replicas there are; give the numbers "
                "too."
            )

    @property
    def mesh(self) -> tuple[int, int | tuple[int, ...]]:
        """`num_stages` and `replicas`. Raises UserError where one of them is "auto"."""
        if isinstance(self.num_stages, str) or isinstance(self.replicas, str):
            name = "num_stages" if isinstance(self.num_stages, str) else "replicas"
            raise UserError(
                f"{name} is auto, and the number of processes that it is chosen for is not known; give num_processes, "
                "or start the processes by torchrun."
            )
        return self.num_stages, self.replicas

    @property
    def is_mesh_open(self) -> bool:
        """Whether the planner chooses the number of stages or of their replicas."""
        return AUTO in (self.num_stages, self.replicas)

    @property
    def shares_updates(self) -> bool:
        """Whether the replicas of a stage share its updates (ZeRO-1)."""
        return bool(self.zero)

    def update_shares(self, count: int) -> int:
        """Among how many replicas the updates of a stage that has `count` of them are divided."""
        return count if self.zero else 1

    def on_mesh(self, num_stages: int, replicas: int | tuple[int, ...], **values: Any) -> Self:
        """A copy with a mesh and other values. Without replicas nothing shares an update, so `zero` is 0."""
        shares = max(replicas_of(num_stages, replicas)) > 1
        return replace(self, num_stages=num_stages, replicas=replicas, zero=self.zero if shares else 0, **values)

    @property
    def processes(self) -> int:
        """How many processes share the stages; if that is not given, one per replica of a stage. Raises as `mesh`."""
        return self.num_processes or self.places

    def stages_of_processes(self) -> int:
        """`num_stages` where it is not given: by the lists that have an entry per stage, or by the processes."""
        for of_stages in (self.partition, self.recompute, self.replicas):
            if isinstance(of_stages, tuple) and of_stages:
                return len(of_stages)
        if self.replicas == AUTO:
            return 1
        num_processes = self.num_processes or int(os.environ.get("WORLD_SIZE", "1")) // self.division.ranks_of(1)
        return max(1, num_processes // self.replicas) if isinstance(self.replicas, int) else 1

    @property
    def places(self) -> int:
        """How many replicas all stages have together. Raises UserError where this is left to the planner."""
        num_stages, replicas = self.mesh
        return sum(replicas) if isinstance(replicas, tuple) else num_stages * replicas

    def placed(self, schedule: str, table: Schedule | None = None) -> Placement:
        """The placement of the stages under a builder's schedule, or that of a table.

        Raises:
            UserError: a text that is no placement, or numbers of stages, replicas and processes that do not fit.
        """
        if table is not None:
            return self.division.placed(table.placement)
        num_stages, replicas = self.mesh
        if self.placement is None:
            return self.division.placed(placement_for(schedule, num_stages, self.processes, replicas))
        every = [[parse_number(number) for number in word.split(",")] for word in self.placement.split()]
        workers = [[worker for worker in own if worker is not None] for own in every]
        if any(None in own for own in every):
            raise UserError(
                f"placement is {self.placement!r}; write the processes of each stage, those of replicas with commas, "
                'such as "0,2 1,3".'
            )
        placement = self.division.placed(Placement(workers, is_dealt=schedule in DEALT))
        sizes = placement.num_stages, placement.num_processes
        if sizes != (num_stages, self.processes) or placement.replicas != replicas_of(num_stages, replicas):
            raise UserError(
                f"placement {self.placement!r} has {sizes[0]} stages with {list(placement.replicas)} replicas on "
                f"{sizes[1]} processes, and num_stages is {num_stages}, replicas {replicas} and num_processes "
                f"{self.processes}; give the same numbers."
            )
        return placement
