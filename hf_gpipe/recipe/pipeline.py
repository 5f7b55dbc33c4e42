"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES, STRATEGIES
from hf_gpipe.recipe.section import Count, OneOf, Positive, Text, section
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.schedule import (
    SCHEDULES,
    TABLE_SUFFIX,
    Schedule,
    is_table_file,
    placement_for,
    read_table,
    recompute_under,
    replicas_of,
)

AUTO = "auto"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULES if name != "forward_only")
PARTITIONS = (*STRATEGIES, *COST_STRATEGIES, AUTO)

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""A decided `recompute`: "none", "block" or "stage", or for each stage one of these or the most graphs to keep."""

_MODES = ("none", "block", "stage")
_Entries = tuple[Annotated[str, OneOf(_MODES)] | Count, ...]
_Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)


@section(kw_only=False)
class PipelineConfig:
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto". All values can be written to a file.
    """

    num_stages: Count = 1
    """K: number of consecutive stages that the model's layers are split into."""

    num_micro_batches: Count | Annotated[str, OneOf((AUTO,))] = 1
    """M: number of micro-batches that a mini-batch is split into; a mini-batch of fewer rows gives one per row; auto:
    the planner chooses."""

    schedule: Annotated[str, OneOf((*TRAINING_SCHEDULES, AUTO), TABLE_SUFFIX)] = "gpipe"
    """Order of work. gpipe: as in the paper; gpipe_fused: the last stage runs each backward right after its forward;
    1f1b: least memory; interleaved_1f1b: several stages per process, assigned in turn; zb_h1: 1f1b with gradients of
    inputs and weights apart, a third of its bubble in its memory; zb_h2: twice the memory, no bubble between steps that
    do not wait for each other; zb_v: two stages per process in a V, no bubble in 1f1b's memory; v_half: the same in
    half of it, with half of 1f1b's bubble; naive: no pipelining; auto: the planner chooses; or the file of a table of
    your own, such as tables/mine.txt, whose R actions are the recomputations (python -m hf_gpipe.plan RECIPE --table
    writes one)."""

    recompute: Annotated[Annotated[str, OneOf((*_MODES, AUTO))] | _Entries, _Listed] = "stage"
    """The activations that are recomputed in backward, not kept. none: nothing; block: the inside of each block; stage:
    all but the stage's input; auto: for each stage as little as `memory` allows. Or a list with one entry per stage, in
    which a number is the most autograd graphs that the stage keeps alive."""

    partition: Annotated[Annotated[str, OneOf(PARTITIONS)] | tuple[Count, ...], _Listed] = "count"
    """How layers are divided among stages. count: equal numbers, give or take one; parameters, flops, profile: minimise
    the largest stage by parameters, by operations, or by the time measured before training; auto: minimise the
    planner's estimate of time; or the number of layers of each stage, such as [3, 4, 2]."""

    memory: Text | None = None
    """The memory limit of each process that the planner plans for, with a unit, such as 80GiB; null: the memory of its
    device."""

    replicas: Annotated[Count | tuple[Count, ...], _Listed] = 1
    """Number of replicas of each stage, which take the micro-batches in turn and add up their gradients: 2 is two
    pipelines side by side. Or a list with one number per stage, such as [2, 1]."""

    zero: Literal[0, 1] = 0
    """1: of the optimizer's state, and of float32 master weights, each replica of a stage keeps a part alone, updates
    its part of the weights, and gets the rest from the others (ZeRO-1); 0: each replica keeps and updates all."""

    boundary_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The type in which hidden states and their gradients are sent from stage to stage, narrower than the model's, for
    slow links; it rounds them. null: the model's type, and nothing is rounded."""

    num_processes: Count | None = None
    """Number of processes that share the stages; null: one per replica of a stage, but at most one per GPU, or one for
    each of `devices`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The type of device that stages run on; auto: GPUs if there are any."""

    devices: Annotated[tuple[Text, ...] | None, _Listed] = None
    """Devices of this machine, divided evenly among the processes, such as [cuda:0, cuda:1]; a process spreads its
    stages over its devices. null: one device per process, of the type of `device`."""

    torch_compile: bool = False
    """Whether to compile each block with torch.compile."""

    torch_compile_backend: Text | None = None
    """The backend of torch.compile; null: its default, inductor."""

    timeout_seconds: Positive = 600.0
    """How many seconds a process waits for another one before the run fails."""

    threads_per_process: Count | None = None
    """CPU threads per process; null: OMP_NUM_THREADS, or the machine's cores divided evenly."""

    def __post_init__(self) -> None:
        if isinstance(self.replicas, tuple):
            replicas_of(self.num_stages, self.replicas)
        if self.num_processes is not None and self.num_processes > self.places:
            raise UserError(
                f"num_processes is {self.num_processes} and num_stages is {self.num_stages}; a process without a stage "
                "has nothing to do: use at most as many processes as stages, or more replicas."
            )
        if self.zero and self.places == self.num_stages:
            raise UserError(
                f"zero is {self.zero} and replicas is {self.replicas}: no stage has replicas that could share its "
                "optimizer's state; use zero 0, or at least 2 replicas of a stage."
            )
        if self.num_processes is not None and self.places > self.num_stages and not is_table_file(self.schedule):
            placement_for("gpipe", self.num_stages, self.num_processes, self.replicas)
        for name, value in (("partition", self.partition), ("recompute", self.recompute)):
            if isinstance(value, tuple) and len(value) != self.num_stages:
                raise UserError(
                    f"{name} {list(value)} has {len(value)} entries and num_stages is {self.num_stages}; give one "
                    "entry for each stage."
                )
        if self.devices == ():
            raise UserError("devices [] is empty; name at least one device, or leave it out.")
        if self.torch_compile_backend is not None and not self.torch_compile:
            raise UserError(
                f"torch_compile_backend is {self.torch_compile_backend!r} and torch_compile is false; set "
                "torch_compile to true, or leave the backend out."
            )
        if self.memory is not None:
            read_bytes(self.memory, "memory")

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
        """How many processes share the stages; one per replica of a stage if `num_processes` is None."""
        return self.num_processes or self.places

    @property
    def places(self) -> int:
        """How many replicas all stages have together."""
        return sum(self.replicas) if isinstance(self.replicas, tuple) else self.num_stages * self.replicas

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as a number."""
        return None if self.memory is None else read_bytes(self.memory, "memory")

    def check_micro_batches(self, accumulation: int) -> None:
        """Raise UserError where a replica would never get a micro-batch.

        Args:
            accumulation: mini-batches per step; a step has the micro-batches of all of them.
        """
        counts = self.replicas if isinstance(self.replicas, tuple) else (self.replicas,)
        if not isinstance(self.num_micro_batches, int) or self.num_micro_batches * accumulation >= max(counts):
            return
        step = f"num_micro_batches is {self.num_micro_batches}"
        if accumulation > 1:
            step += f", of each of the {accumulation} mini-batches of a step,"
        raise UserError(
            f"{step} and stage {counts.index(max(counts))} has {max(counts)} replicas: they take the micro-batches of "
            "a step in turn, so some would never get one; use at least as many micro-batches as replicas (for an even "
            "load a multiple of them), or fewer replicas."
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
        step: int | str = self.num_micro_batches
        if isinstance(step, int):
            step *= accumulation
        table = read_table(self.schedule, self.num_stages, step, num_processes, self.replicas)
        recompute_under(table, self.recompute)
        return table

    def decided(self, **values: Any) -> DecidedConfig:
        """A copy with `values`, which replace everything that is left to the planner."""
        return DecidedConfig(**{**vars(self), "num_processes": self.processes, **values})


@section()
class DecidedConfig(PipelineConfig):
    """A `PipelineConfig` that leaves nothing to the planner: what is run, and what a plan describes."""

    num_micro_batches: Count
    schedule: Annotated[str, OneOf(TRAINING_SCHEDULES, TABLE_SUFFIX)]
    recompute: Annotated[Annotated[str, OneOf(_MODES)] | _Entries, _Listed]
    partition: Annotated[tuple[Count, ...], _Listed]
    num_processes: Count

    def reopened(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
