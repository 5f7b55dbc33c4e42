"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

from hf_gpipe.errors import UserError
from hf_gpipe.recipe.pipeline.chunks import ChunkKeys
from hf_gpipe.recipe.pipeline.processes import EACH_PROCESS, RUN, ProcessKeys
from hf_gpipe.recipe.pipeline.stages import (
    ASYNCHRONOUS,
    AUTO,
    HEAD_IN_PARTS,
    MODES,
    PLANNED,
    SYNCHRONOUS_SCHEDULES,
    TRAINING_SCHEDULES,
    Entries,
    Listed,
)
from hf_gpipe.recipe.section import Count, OneOf, keys_of, section
from hf_gpipe.recipe.words import choices
from hf_gpipe.schedule import (
    ASYNCHRONOUS_SCHEDULES,
    TABLE_SUFFIX,
    Schedule,
    is_table_file,
    read_table,
    recompute_under,
)


@section(kw_only=False)
class PipelineConfig(ProcessKeys):
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto", and micro-batches, schedule, recomputation and
    partition where they are not given. All values can be written to a file.
    """

    def __post_init__(self) -> None:
        if vars(self)["num_stages"] is None:
            object.__setattr__(self, "num_stages", self.stages_of_processes())
        self.check()
        if self.divides_head:
            self.check_beside(HEAD_IN_PARTS)
        if self.schedule in ASYNCHRONOUS_SCHEDULES:
            self.check_beside(ASYNCHRONOUS)
            if self.is_mesh_open:
                name = "num_stages" if self.num_stages == AUTO else "replicas"
                raise UserError(
                    f"schedule is {self.schedule} and {name} is auto; give {name}, for with it the numbers of an "
                    "asynchronous schedule change."
                )

    @classmethod
    def of(cls, config: PipelineConfig | None, **given: Any) -> PipelineConfig:
        """Make the configuration from the arguments of `Pipeline`: a configuration, or its fields.

        A field that is None is not given. A string as `torch_compile` is the backend, a number as `memory` is bytes.

        Raises:
            UserError: both are given, or a field does not fit.
        """
        given = {name: value for name, value in cls.compiling(given).items() if value is not None}
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
        visit = not self.leaves_visits_open and self.visitors is not None
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
        return [name for name in _may_be_auto() if self.is_open(name)]

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
        step, chunks = self.num_micro_batches, self.chunks.most
        if isinstance(step, int):
            step *= accumulation * chunks
        table = read_table(self.schedule, num_stages, step, num_processes, replicas, chunks)
        recompute_under(table, self.recompute)
        self.check_table(table)
        return table

    def with_auto(self, num_processes: int) -> PipelineConfig:
        """A copy that leaves all to the planner but how rows are cut, and what processes have and share."""
        names = [name for name in _may_be_auto() if name not in ChunkKeys.__annotations__]
        values = dict.fromkeys(names, AUTO) | {"placement": None, "num_processes": num_processes}
        return PipelineConfig(**{**vars(self), **values})

    def decided(self, **values: Any) -> DecidedConfig:
        """A copy with `values`, which replace everything that is left to the planner."""
        return DecidedConfig(**{**vars(self), "num_processes": self.processes, **values})


#: Keys that may have another value in each process, and keys of a run that a plan does not have, these among them.
OF_EACH_PROCESS = tuple(name for name, key in keys_of(PipelineConfig).items() if EACH_PROCESS in key.marks)
OF_THE_RUN = tuple(name for name, key in keys_of(PipelineConfig).items() if {EACH_PROCESS, RUN} & {*key.marks})


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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.left_open:
            raise UserError(f"{name} is {getattr(self, name)}, and here it must be decided.")

    @property
    def in_short(self) -> dict[str, Any]:
        """The values of the keys that say how the pipeline is cut and run."""
        names = ("num_stages", "num_micro_batches", "schedule", "recompute")
        return {name: getattr(self, name) for name in names}

    def to_give(self, values: Mapping[str, Any], recipe: PipelineConfig) -> dict[str, Any]:
        """The values of `of_plan` that a recipe must be given, because they are not the recipe's or not the default."""
        always = (*self.in_short, "partition", "num_processes", "zero")
        keys = keys_of(PipelineConfig)
        return {
            name: value
            for name, value in values.items()
            if name in always or not value == keys[name].default == getattr(recipe, name)
        }

    def replaced(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
