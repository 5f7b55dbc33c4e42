"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Annotated, Any, Self

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline_keys import (
    AUTO,
    MODES,
    OF_THE_RUN,
    PLANNED,
    SYNCHRONOUS_SCHEDULES,
    TRAINING_SCHEDULES,
    Chunks,
    Entries,
    Listed,
    Visitors,
)
from hf_gpipe.recipe.pipeline_rules import check
from hf_gpipe.recipe.pipeline_values import PipelineValues
from hf_gpipe.recipe.section import Count, NotNegative, OneOf, Positive, keys_of, section
from hf_gpipe.recipe.words import choices
from hf_gpipe.schedule import (
    TABLE_SUFFIX,
    Schedule,
    is_table_file,
    read_table,
    recompute_under,
    replicas_of,
)
from hf_gpipe.schedule.kinds import LOAD


@section(kw_only=False)
class PipelineConfig(PipelineValues):
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto", and micro-batches, schedule, recomputation and
    partition where they are not given. All values can be written to a file.
    """

    def __post_init__(self) -> None:
        if vars(self)["num_stages"] is None:
            object.__setattr__(self, "num_stages", self.stages_of_processes())
        check(self)
        self.memory_bytes  # noqa: B018  # raises for a text that is no size

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
            UserError: the file cannot be read, its table cannot be run, or it contradicts the other fields.
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
        if LOAD in table.kinds and self.offload_weights is None:
            raise UserError(
                f"the table {table.name!r} loads and drops weights (L and D), and offload_weights is not given; set it "
                "to frozen or all, or leave L and D out of the table"
            )
        return table

    def with_auto(self, num_processes: int) -> PipelineConfig:
        """A copy that leaves all to the planner but the number of processes, their memory and speed, and `zero`."""
        names = ("num_stages", "replicas", "num_micro_batches", "schedule", "recompute", "partition", "offload_weights")
        values = dict.fromkeys(names, AUTO) | {"placement": None, "num_processes": num_processes}
        return PipelineConfig(**{**vars(self), **values})

    def on_mesh(self, num_stages: int, replicas: int | tuple[int, ...], **values: Any) -> PipelineConfig:
        """A copy with a mesh and other values. Without replicas nothing shares an update, so `zero` is 0."""
        shares = max(replicas_of(num_stages, replicas)) > 1
        return replace(self, num_stages=num_stages, replicas=replicas, zero=self.zero if shares else 0, **values)

    def cut_into(self, chunks: Chunks, **values: Any) -> Self:
        """A copy whose rows are cut so, with other values."""
        return replace(self, sequence_chunks=chunks.most, chunk_taper=chunks.taper, **values)

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

    @property
    def in_short(self) -> dict[str, Any]:
        """The values of the keys that say how the pipeline is cut and run."""
        names = ("num_stages", "num_micro_batches", "schedule", "recompute")
        return {name: getattr(self, name) for name in names}

    def replaced(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
