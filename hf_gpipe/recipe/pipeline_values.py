"""The meaning of the keys of `pipeline` together: the mesh, the placement, and how rows and layers are cut."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES
from hf_gpipe.recipe.pipeline_keys import AUTO, CHUNK_UNIT, Chunks, Division, PipelineKeys, Visitors
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.schedule import DEALT, DIVIDED_HEAD, Placement, Schedule, placement_for, replicas_of
from hf_gpipe.schedule.actions import parse_number


class PipelineValues(PipelineKeys):
    """The values that are read off the keys of `PipelineConfig`."""

    @property
    def mesh(self) -> tuple[int, int | tuple[int, ...]]:
        """`num_stages` and `replicas`, where the planner need not choose them.

        Raises:
            UserError: one of them is "auto".
        """
        if isinstance(self.num_stages, str) or isinstance(self.replicas, str):
            name = "num_stages" if isinstance(self.num_stages, str) else "replicas"
            raise UserError(
                f"{name} is auto, and the number of processes that it is chosen for is not known; give num_processes, "
                "or start the processes by torchrun."
            )
        return self.num_stages, self.replicas

    @property
    def visitors(self) -> Visitors | None:
        """The weights that visit the device of their stage, where the planner need not choose them; None: none does.

        Raises:
            UserError: they are "auto".
        """
        if self.leaves_visits_open:
            raise UserError("offload_weights is auto, which a plan chooses; give frozen or all, or leave it out.")
        return cast("Visitors | None", self.offload_weights)

    @property
    def leaves_visits_open(self) -> bool:
        """Whether the planner chooses the weights that visit."""
        return self.offload_weights == AUTO

    def update_shares(self, count: int) -> int:
        """Among how many replicas the updates of a stage that has `count` of them are divided."""
        return count if self.zero else 1

    @property
    def divides_head(self) -> bool:
        """Whether the schedule divides the head over the stages."""
        return self.schedule in DIVIDED_HEAD

    @property
    def why_whole_head(self) -> str:
        """The reason why no schedule can divide the head; empty: there is none."""
        others = {
            "tensor_parallel is above 1": self.tensor_parallel > 1,
            "sequence_chunks is above 1": self.cuts_rows,
            "boundary_dtype is given": self.boundary_dtype is not None,
            "offload_weights is given": self.offload_weights is not None,
        }
        return next((what for what, is_so in others.items() if is_so), "")

    @property
    def division(self) -> Division:
        """How layers are divided."""
        return Division(self.tensor_parallel, self.sequence_parallel)

    @property
    def cuts_rows(self) -> bool:
        """Whether rows are cut into chunks, or may be."""
        return self.sequence_chunks != 1

    @property
    def chunks(self) -> Chunks:
        """How rows are cut into chunks, where the planner need not choose that."""
        return Chunks(cast("int", self.sequence_chunks), cast("float", self.chunk_taper))

    @property
    def most_chunk_tokens(self) -> int | None:
        """The most tokens of a chunk, where they are given; None: the number of chunks is given, or open.

        Raises:
            UserError: the text is neither "auto" nor a number of tokens.
        """
        given = self.sequence_chunks
        if isinstance(given, int) or given == AUTO:
            return None
        number = given.removesuffix(CHUNK_UNIT)
        if not number.isdecimal() or not number.isascii() or not (tokens := int(number[:18])):
            raise UserError(
                f"sequence_chunks is {given!r}; write a number of chunks, auto, or the most tokens of a chunk, such as "
                "4096 tokens."
            )
        return tokens

    def num_chunks(self, tokens: int) -> int | None:
        """Into how many chunks rows of so many tokens are cut; None: the planner chooses."""
        if isinstance(self.sequence_chunks, int):
            return self.sequence_chunks
        most = self.most_chunk_tokens
        return None if most is None else -(-tokens // most)

    @property
    def is_mesh_open(self) -> bool:
        """Whether the planner chooses the number of stages or of their replicas."""
        return AUTO in (self.num_stages, self.replicas)

    @property
    def is_cut_by_cost(self) -> bool:
        """Whether the planner cuts the model, or may do so."""
        return self.partition in (None, AUTO, *COST_STRATEGIES)

    @property
    def processes(self) -> int:
        """How many processes share the stages; one per replica of a stage if `num_processes` is None.

        Raises:
            UserError: stages or replicas are "auto", and `num_processes` is None.
        """
        return self.num_processes or self.places

    def workers_among(self, num_processes: int) -> int:
        """How many workers so many processes form: T each.

        Raises:
            UserError: T does not divide their number.
        """
        if num_processes % self.tensor_parallel:
            raise UserError(
                f"tensor_parallel is {self.tensor_parallel} and there are {num_processes} processes; start a "
                f"multiple of {self.tensor_parallel}, for so many share each stage."
            )
        return num_processes // self.tensor_parallel

    def workers_on(self, num_gpus: int) -> int:
        """How many workers so many GPUs are enough for. Raises UserError where it is none."""
        if num_gpus < self.tensor_parallel:
            raise UserError(
                f"pipeline.tensor_parallel is {self.tensor_parallel} and this machine has {num_gpus} GPUs; use at most "
                "as many, a launcher on several machines, or pipeline.device=cpu"
            )
        return num_gpus // self.tensor_parallel

    def ranks_of(self, num_workers: int) -> int:
        """How many processes form so many workers."""
        return num_workers * self.tensor_parallel

    def stages_of_processes(self) -> int:
        """`num_stages` where it is not given: by the lists that have an entry per stage, or by the processes."""
        for of_stages in (self.partition, self.recompute, self.replicas):
            if isinstance(of_stages, tuple) and of_stages:
                return len(of_stages)
        if self.replicas == AUTO:
            return 1
        num_processes = self.num_processes or int(os.environ.get("WORLD_SIZE", "1")) // self.tensor_parallel
        return max(1, num_processes // self.replicas) if isinstance(self.replicas, int) else 1

    @property
    def places(self) -> int:
        """How many replicas all stages have together. Raises UserError where this is left to the planner."""
        num_stages, replicas = self.mesh
        return sum(replicas) if isinstance(replicas, tuple) else num_stages * replicas

    @property
    def memory_bytes(self) -> int | tuple[int, ...] | None:
        """`memory` as a number, or one for each process."""
        if isinstance(self.memory, tuple):
            return tuple(read_bytes(limit, "memory") for limit in self.memory)
        return None if self.memory is None else read_bytes(self.memory, "memory")

    @property
    def given_speeds(self) -> tuple[float, ...] | None:
        """`speeds`, where it has numbers."""
        return self.speeds if isinstance(self.speeds, tuple) else None

    def placed(self, schedule: str, table: Schedule | None = None) -> Placement:
        """The placement of the stages under a builder's schedule, or that of a table.

        Raises:
            UserError: a text that is no placement, or numbers of stages, replicas and processes that do not fit.
        """
        if table is not None:
            return replace(table.placement, ranks_per_worker=self.tensor_parallel)
        num_stages, replicas = self.mesh
        if self.placement is None:
            placement = placement_for(schedule, num_stages, self.processes, replicas)
            return replace(placement, ranks_per_worker=self.tensor_parallel)
        every = [[parse_number(number) for number in word.split(",")] for word in self.placement.split()]
        workers = [[worker for worker in own if worker is not None] for own in every]
        if any(None in own for own in every):
            raise UserError(
                f"placement is {self.placement!r}; write the processes of each stage, those of replicas with commas, "
                'such as "0,2 1,3".'
            )
        placement = Placement(workers, ranks_per_worker=self.tensor_parallel, is_dealt=schedule in DEALT)
        sizes = placement.num_stages, placement.num_processes
        if sizes != (num_stages, self.processes) or placement.replicas != replicas_of(num_stages, replicas):
            raise UserError(
                f"placement {self.placement!r} has {sizes[0]} stages with {list(placement.replicas)} replicas on "
                f"{sizes[1]} processes, and num_stages is {num_stages}, replicas {replicas} and num_processes "
                f"{self.processes}; give the same numbers."
            )
        return placement
