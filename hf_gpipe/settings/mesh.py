"""The stages and their mesh: how the model and its mini-batches are cut, in which order, and on which processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES, COUNT
from hf_gpipe.schedule import (
    SCHEDULES,
    TABLE_SUFFIX,
    Placement,
    Schedule,
    is_table_file,
    placement_for,
    replicas_of,
    training_schedules,
    window_schedules,
)
from hf_gpipe.schedule.actions import parse_number
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mode import AUTO, NOT_GIVEN, Auto, Listed, NotGiven
from hf_gpipe.settings.schedules import SharedUpdates
from hf_gpipe.settings.section import Count, Settings, Text, one_of

#: What `zero` 1 becomes on a mesh that the planner has chosen without replicas.
UNSHARED = "zero 0 (no stage has replicas)"

MODES = ("none", "block", "stage", "host")


def _texts(names: Iterable[str]) -> str:
    return "; ".join(f"{name}: {SCHEDULES[name].text}" for name in names)


_SCHEDULE = (
    f"Order of work. {_texts(training_schedules())}; auto: the planner chooses one of these, but not naive, or makes a "
    "table for the memory there is; or the file of a table of your own, such as tables/mine.txt, whose R actions are "
    "the recomputations (hf-gpipe plan RECIPE --table writes one). In windows, where each stage updates by itself "
    "after each step and nothing waits for the pipeline to empty, with other numbers than the plain model: "
    f"{_texts(window_schedules())}. null: auto, or gpipe where nothing can be planned."
)

ScheduleName = Annotated[str, one_of(*training_schedules(), *window_schedules())]
Strategy = Annotated[str, one_of(COUNT, *COST_STRATEGIES)]
Recomputation = Annotated[str, one_of(*MODES)]
TableFile = Annotated[str, Field(pattern=rf"\{TABLE_SUFFIX}$")]
Recomputations = tuple[Recomputation | Count, ...]


class MeshConfig(Settings):
    """How the model is cut into stages, in which order they run, and which processes hold them."""

    num_stages: Count | Auto = NOT_GIVEN
    """K: number of consecutive stages that the model's layers are split into; auto: the planner chooses for the number
    of processes; not given: the number of processes that torchrun or accelerate launch started, divided by the
    replicas."""

    num_micro_batches: NotGiven[Count | Auto] = NOT_GIVEN
    """M: number of micro-batches that a mini-batch is split into; a mini-batch with fewer rows is split into single
    rows; auto: the planner chooses; null: auto, or 1 where nothing can be planned."""

    schedule: Annotated[NotGiven[ScheduleName | Auto | TableFile], Field(description=_SCHEDULE)] = NOT_GIVEN

    recompute: Annotated[NotGiven[Recomputation | Auto | Recomputations], Listed] = NOT_GIVEN
    """The activations that are recomputed in the backward instead of being kept. none: nothing; block: the inside of
    each block; stage: everything but the stage's input; host: nothing, and activations wait in CPU memory between
    forward and backward; auto: for each stage as little as `memory` allows. Or a list with one entry per stage, in
    which a number is the most micro-batches whose activations the stage keeps. null: auto, or stage where nothing can
    be planned."""

    partition: Annotated[NotGiven[Strategy | Auto | tuple[Count, ...]], Listed] = NOT_GIVEN
    """How layers are divided among stages. count: equal numbers, give or take one; parameters, flops, profile: the
    largest stage is as small as possible by parameters, by operations, or by the time measured before training; auto:
    by the planner's estimate of time; or the number of layers of each stage, such as [3, 4, 2]; null: auto, or count
    where nothing can be planned."""

    division: Division = Division()

    replicas: Annotated[Count | Auto | tuple[Count, ...], Listed] = 1
    """Number of replicas of each stage, which take the micro-batches in turn and add up their gradients: 2 is two
    pipelines side by side. Or a list with one number per stage, such as [2, 1]; auto: the planner chooses for the
    number of processes."""

    placement: Text | None = None
    """The processes of each stage, with commas between its replicas, such as "0,2 1,3" for two stages with two
    replicas. null: the processes of a pipeline follow each other; if `replicas` is a list of different numbers, those
    of a stage do."""

    shared_updates: SharedUpdates = SharedUpdates()

    num_processes: Count | None = None
    """Number of processes that share the stages; null: one per replica of a stage, but at most one per GPU, or one for
    each of `devices`; with `replicas` or `num_stages` auto one per GPU."""

    def check_mesh(self) -> None:
        """Raise UserError where stages, replicas, placement and processes do not fit each other."""
        for name, value in (("partition", self.partition), ("recompute", self.recompute)):
            if isinstance(value, tuple) and self.num_stages not in (AUTO, len(value)):
                raise UserError(
                    f"{name} {list(value)} has {len(value)} entries and num_stages is {self.num_stages}; give one "
                    "entry for each stage."
                )
        if self.is_mesh_open:
            self._check_open_mesh()
            return
        num_stages, replicas = self.mesh
        replicas_of(num_stages, replicas)
        if self.num_processes is not None and self.num_processes > self.places:
            raise UserError(
                f"num_processes is {self.num_processes} and num_stages is {num_stages}; a process without a stage "
                "has nothing to do: use at most as many processes as stages, or more replicas."
            )
        if self.shared_updates.zero and self.places == num_stages:
            raise UserError(
                f"zero is 1 and replicas is {replicas}: no stage has replicas that could share its "
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
    def is_cut_by_cost(self) -> bool:
        """Whether the planner cuts the model, or may do so."""
        return self.partition in (None, AUTO, *COST_STRATEGIES)

    @property
    def is_mesh_open(self) -> bool:
        """Whether the planner chooses the number of stages or of their replicas."""
        return AUTO in (self.num_stages, self.replicas)

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
        num_processes = self.num_processes or int(os.environ.get("WORLD_SIZE", "1")) // self.division.num_ranks
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
        is_shared = schedule in SCHEDULES and SCHEDULES[schedule].is_shared
        placement = self.division.placed(Placement(workers, is_shared=is_shared))
        sizes = placement.num_stages, placement.num_processes
        if sizes != (num_stages, self.processes) or placement.replicas != replicas_of(num_stages, replicas):
            raise UserError(
                f"placement {self.placement!r} has {sizes[0]} stages with {list(placement.replicas)} replicas on "
                f"{sizes[1]} processes, and num_stages is {num_stages}, replicas {replicas} and num_processes "
                f"{self.processes}; give the same numbers."
            )
        return placement
