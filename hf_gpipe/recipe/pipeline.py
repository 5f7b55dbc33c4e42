"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES
from hf_gpipe.recipe.pipeline_keys import (
    AUTO,
    CHUNK_UNIT,
    MODES,
    OF_THE_RUN,
    PLANNED,
    SYNCHRONOUS_SCHEDULES,
    TRAINING_SCHEDULES,
    Division,
    Entries,
    Listed,
    PipelineKeys,
    Visitors,
)
from hf_gpipe.recipe.pipeline_rules import check
from hf_gpipe.recipe.section import Count, NotNegative, OneOf, Positive, keys_of, section
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.recipe.words import choices
from hf_gpipe.schedule import (
    DEALT,
    DIVIDED_HEAD,
    TABLE_SUFFIX,
    Placement,
    Schedule,
    is_table_file,
    placement_for,
    read_table,
    recompute_under,
    replicas_of,
)
from hf_gpipe.schedule.actions import parse_number


@section(kw_only=False)
class PipelineConfig(PipelineKeys):
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto", and micro-batches, schedule, recomputation and
    partition where they are not given. All values can be written to a file.
    """

    def __post_init__(self) -> None:
        if vars(self)["num_stages"] is None:
            object.__setattr__(self, "num_stages", self._stages_of_processes())
        check(self)
        self.memory_bytes  # noqa: B018  # raises for a text that is no size

    def _stages_of_processes(self) -> int:
        """`num_stages` where it is not given: by the lists that have an entry per stage, or by the processes."""
        for of_stages in (self.partition, self.recompute, self.replicas):
            if isinstance(of_stages, tuple) and of_stages:
                return len(of_stages)
        if self.replicas == AUTO:
            return 1
        num_processes = self.num_processes or int(os.environ.get("WORLD_SIZE", "1")) // self.tensor_parallel
        return max(1, num_processes // self.replicas) if isinstance(self.replicas, int) else 1

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

    @classmethod
    def of(cls, config: PipelineConfig | None, **given: Any) -> PipelineConfig:
        """Make the configuration from the arguments of `Pipeline`: a configuration, or its fields.

        A field that is None is not given. A string as `torch_compile` is the backend, a number as `memory` is bytes.

        Raises:
            UserError: both are given, or a field does not fit.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if isinstance(backend := given.get("torch_compile"), str):
            given |= {"torch_compile": True, "torch_compile_backend": backend}
        if isinstance(memory := given.get("memory"), int):
            given["memory"] = f"{memory}B"
        if config is None:
            return cls(**given)
        if given:
            raise UserError(f"config and {', '.join(given)} are given; put {next(iter(given))} into the config")
        return config

    def settled(self, *, can_plan: bool) -> PipelineConfig:
        """A copy in which all that is not given is "auto", or where nothing can be planned the plain value of PLANNED.

        The planner chooses among synchronous schedules. With another one, or the file of a table, a plain value is
        taken too.

        Args:
            can_plan: whether the shape of a mini-batch and the memory of the optimizer are known.
        """
        # Of weights that visit it chooses what is "auto".
        visit = self.offload_weights not in (None, AUTO)
        is_auto = can_plan and not visit and self.schedule in (None, AUTO, *SYNCHRONOUS_SCHEDULES)
        plain = {**PLANNED, "schedule": "breadth_first"} if visit else PLANNED
        values: dict[str, Any] = {name: AUTO if is_auto else plain[name] for name in self.not_given}
        return replace(self, **values) if values else self

    @property
    def not_given(self) -> list[str]:
        """The names of PLANNED that are not given."""
        return [name for name in PLANNED if getattr(self, name) is None]

    @property
    def of_plan(self) -> dict[str, Any]:
        """The values of the keys that a plan has."""
        return {name: getattr(self, name) for name in keys_of(PipelineConfig) if name not in OF_THE_RUN}

    @property
    def left_open(self) -> list[str]:
        """The names of the keys whose value the planner chooses, by "auto" or by the length of a chunk."""
        has_length = self.sequence_chunks != AUTO and isinstance(self.sequence_chunks, str)
        return [n for n in _may_be_auto() if getattr(self, n) == AUTO or (n == "sequence_chunks" and has_length)]

    @property
    def is_decided(self) -> bool:
        """Whether nothing is left to the planner."""
        return not (self.left_open or self.not_given or self.is_cut_by_cost)

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

    def placed(self, schedule: str) -> Placement:
        """The placement of the stages under a builder's schedule.

        Raises:
            UserError: a text that is no placement, or numbers of stages, replicas and processes that do not fit.
        """
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

    def check_micro_batches(self, accumulation: int, rows: int | None = None) -> None:
        """Raise UserError where a replica would never get a micro-batch.

        Args:
            accumulation: mini-batches per step; a step has the micro-batches of all of them.
            rows: of a mini-batch, which has at most as many micro-batches; None: not known.
        """
        if self.is_mesh_open:
            return
        _, replicas = self.mesh
        counts = replicas if isinstance(replicas, tuple) else (replicas,)
        limits = {"num_micro_batches is": self.num_micro_batches, "the number of rows of a mini-batch is": rows}
        known = {words: limit for words, limit in limits.items() if isinstance(limit, int)}
        for words, limit in known.items():
            if limit * accumulation >= max(counts):
                continue
            step = f"{words} {limit}"
            if accumulation > 1:
                step += f", of each of the {accumulation} mini-batches of a step,"
            raise UserError(
                f"{step} and stage {counts.index(max(counts))} has {max(counts)} replicas: they take the micro-batches "
                "of a step in turn, so some would never get one; use at least as many micro-batches, and rows, as "
                "replicas (for an even load a multiple of them), or fewer replicas."
            )

    def table(self, accumulation: int, num_processes: int) -> Schedule | None:
        """Read the table from the file that `schedule` names; None if it names a builder or is "auto".

        Args:
            accumulation: mini-batches per step; the table has the micro-batches of all of them.
            num_processes: the number of processes of the job.

        Raises:
            ScheduleError: the file cannot be read, its table cannot be run, or it contradicts the other fields.
        """
        if not is_table_file(self.schedule):
            return None
        self = self.settled(can_plan=False)
        num_stages, replicas = self.mesh
        assert isinstance(self.sequence_chunks, int), "it was checked"
        step: int | str = self.num_micro_batches
        if isinstance(step, int):
            step *= accumulation * self.sequence_chunks
        table = read_table(self.schedule, num_stages, step, num_processes, replicas, self.sequence_chunks)
        recompute_under(table, self.recompute)
        return table

    def with_auto(self, num_processes: int) -> PipelineConfig:
        """A copy that leaves all to the planner but the number of processes, their memory and speed, and `zero`."""
        names = ("num_stages", "replicas", "num_micro_batches", "schedule", "recompute", "partition", "offload_weights")
        values = dict.fromkeys(names, AUTO) | {"placement": None, "num_processes": num_processes}
        return PipelineConfig(**{**vars(self), **values})

    def decided(self, **values: Any) -> DecidedConfig:
        """A copy with `values`, which replace everything that is left to the planner."""
        return DecidedConfig(**{**vars(self), "num_processes": self.processes, **values})


@cache
def _may_be_auto() -> list[str]:
    """The names of the keys whose value the planner may choose."""
    keys = keys_of(PipelineConfig)
    return [name for name, key in keys.items() if name not in OF_THE_RUN and AUTO in choices(key.schema)]


@section()
class DecidedConfig(PipelineConfig):
    """A `PipelineConfig` that leaves nothing to the planner: what is run, and what a plan describes."""

    num_stages: Count
    num_micro_batches: Count
    schedule: Annotated[str, OneOf(TRAINING_SCHEDULES, TABLE_SUFFIX)]
    replicas: Annotated[Count | tuple[Count, ...], Listed] = 1
    recompute: Annotated[Annotated[str, OneOf(MODES)] | Entries, Listed]
    partition: Annotated[tuple[Count, ...], Listed]
    num_processes: Count
    sequence_chunks: Count = 1
    chunk_taper: NotNegative = 0.0
    offload_weights: Visitors | None = None
    speeds: Annotated[tuple[Positive, ...] | None, Listed] = None

    def replaced(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
