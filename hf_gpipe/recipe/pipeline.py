"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES, STRATEGIES
from hf_gpipe.recipe.section import Count, OneOf, Positive, Text, section
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.schedule import SCHEDULES, TABLE_SUFFIX

AUTO = "auto"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward_only")
PARTITIONS = (*STRATEGIES, *COST_STRATEGIES, AUTO)

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""A decided `recompute`: "none", "block" or "stage", or for each stage one of these or its most live graphs."""

_MODES = ("none", "block", "stage")
_Entries = tuple[Annotated[str, OneOf(_MODES)] | Count, ...]
_Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)


@section(kw_only=False)
class PipelineConfig:
    """How the model is cut into stages, and how micro-batches go through them.

    "auto" leaves a value to the planner; it is decided once none is left. Holds values that a file can hold.
    """

    num_stages: Count = 1
    """K: consecutive stages the model's layers are cut into."""

    num_micro_batches: Count | Annotated[str, OneOf((AUTO,))] = 1
    """M: micro-batches a mini-batch is cut into; a smaller mini-batch gives one per row; auto: the planner's choice."""

    schedule: Annotated[str, OneOf((*TRAINING_SCHEDULES, AUTO), TABLE_SUFFIX)] = "gpipe"
    """Order of work: gpipe, the paper's; gpipe_fused, its last stage's backwards at once; 1f1b, least memory;
    interleaved_1f1b, several stages per process, dealt out in turn; naive; auto: the planner's choice; or the file of
    a table of your own, as tables/mine.txt, whose R say what is recomputed (python -m hf_gpipe.plan RECIPE --table
    writes one)."""

    recompute: Annotated[Annotated[str, OneOf((*_MODES, AUTO))] | _Entries, _Listed] = "stage"
    """What backward computes again instead of keeping: nothing, each block's inside, or all but the stage's input;
    auto: stage by stage as little as `memory` allows. Or a list with an entry for each stage, in which a number is the
    most autograd graphs that the stage keeps alive."""

    partition: Annotated[Annotated[str, OneOf(PARTITIONS)] | tuple[Count, ...], _Listed] = "count"
    """count: stages of equally many layers, give or take one; parameters, flops, profile: the largest or slowest stage
    is the least, by size, by operations, or as measured before the training; auto: by the planner's estimate of time;
    or the number of layers of each stage, as [3, 4, 2]."""

    memory: Text | None = None
    """What a process may use, with its unit, as 80GiB: the planner's limit for what it chooses; null: its device's."""

    num_processes: Count | None = None
    """Processes that share the stages; null: one per stage, but at most one per GPU, or one for each of `devices`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where stages compute; auto: on GPUs where there are any."""

    devices: Annotated[tuple[Text, ...] | None, _Listed] = None
    """Devices of this machine that the processes share out evenly, as [cuda:0, cuda:1]; a process spreads its stages
    over its own. null: one device per process, of the kind that `device` says."""

    torch_compile: bool = False
    """Whether each block is compiled by torch.compile."""

    torch_compile_backend: Text | None = None
    """torch.compile's backend; null: its default, inductor."""

    timeout_seconds: Positive = 600.0
    """How long a process waits for another before the run fails."""

    threads_per_process: Count | None = None
    """CPU threads of each process; null: OMP_NUM_THREADS, or the machine's cores shared out evenly."""

    def __post_init__(self) -> None:
        if self.num_processes is not None and self.num_processes > self.num_stages:
            raise UserError(
                f"num_processes is {self.num_processes} and num_stages is {self.num_stages}; a process without a stage "
                "has nothing to do: use at most as many processes as stages."
            )
        for name, value in (("partition", self.partition), ("recompute", self.recompute)):
            if isinstance(value, tuple) and len(value) != self.num_stages:
                raise UserError(
                    f"{name} {list(value)} has {len(value)} entries and num_stages is {self.num_stages}; give one "
                    "entry for each stage."
                )
        if self.devices == ():
            raise UserError("devices [] names none; name some, or leave it out.")
        if self.torch_compile_backend is not None and not self.torch_compile:
            raise UserError(
                f"torch_compile_backend is {self.torch_compile_backend!r} and torch_compile is false; set "
                "torch_compile to true, or leave the backend out."
            )
        if self.memory is not None:
            read_bytes(self.memory, "memory")

    @classmethod
    def of(cls, config: PipelineConfig | None, **given: Any) -> PipelineConfig:
        """From what `Pipeline` is given: a configuration, or its fields.

        None is a field that is not given. A text as `torch_compile` names the backend, a number as `memory` is bytes.

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

    @property
    def is_decided(self) -> bool:
        """Whether nothing is left to the planner."""
        return AUTO not in (self.num_micro_batches, self.schedule, self.recompute) and not self.is_cut_by_cost

    @property
    def is_cut_by_cost(self) -> bool:
        """Whether the planner cuts the model."""
        return self.partition in (AUTO, *COST_STRATEGIES)

    @property
    def processes(self) -> int:
        """How many processes share the stages; without a number it is one per stage."""
        return self.num_processes or self.num_stages

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as a number."""
        return None if self.memory is None else read_bytes(self.memory, "memory")

    def decided(self, **values: Any) -> DecidedConfig:
        """The same with `values`, which decide all that is open."""
        return DecidedConfig(**{**vars(self), "num_processes": self.processes, **values})


@section()
class DecidedConfig(PipelineConfig):
    """A `PipelineConfig` that leaves nothing to the planner: the type of what is run and planned."""

    num_micro_batches: Count
    schedule: Annotated[str, OneOf(TRAINING_SCHEDULES, TABLE_SUFFIX)]
    recompute: Annotated[Annotated[str, OneOf(_MODES)] | _Entries, _Listed]
    partition: Annotated[tuple[Count, ...], _Listed]
    num_processes: Count

    def reopened(self, **values: Any) -> PipelineConfig:
        """The same with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
