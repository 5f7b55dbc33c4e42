"""`PipelineConfig`: how a model is cut into stages and run, the same object from the recipe to the `Pipeline`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES, STRATEGIES
from hf_gpipe.recipe.section import OR_NULL, Count, NotNegative, OneOf, Positive, Text, section
from hf_gpipe.recipe.sizes import read_bytes
from hf_gpipe.schedule import (
    ASYNCHRONOUS_SCHEDULES,
    DEALT,
    DIVIDED_HEAD,
    SCHEDULES,
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

AUTO = "auto"
SYNCHRONOUS_SCHEDULES = tuple(name for name in SCHEDULES if not name.endswith("forward_only"))
TRAINING_SCHEDULES = (*SYNCHRONOUS_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
CHUNK_UNIT = " tokens"
PARTITIONS = (*STRATEGIES, *COST_STRATEGIES, AUTO)
#: Keys that may have another value in each process.
OF_EACH_PROCESS = ("device", "devices", "threads_per_process", "memory")
#: What the planner chooses where it is not given, and what it is where nothing can be planned.
Visitors = Literal["frozen", "all"]
"""The weights that visit their device: those that are not trained, or all but trained ones that stages may share."""

PLANNED = {"num_micro_batches": 1, "schedule": "gpipe", "recompute": "stage", "partition": "count"}

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""A decided `recompute`: "none", "block" or "stage", or for each stage one of these or the most graphs to keep."""

_MODES = ("none", "block", "stage")
_Entries = tuple[Annotated[str, OneOf(_MODES)] | Count, ...]
_Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)


@section(kw_only=False)
class PipelineConfig:
    """How the model is split into stages, and how micro-batches go through them.

    The planner chooses the values that are "auto", and micro-batches, schedule, recomputation and
    partition where they are not given. All values can be written to a file.
    """

    num_stages: Count | Annotated[str, OneOf((AUTO,))] = None  # type: ignore[assignment]  # until it is made
    """K: number of consecutive stages that the model's layers are split into; auto: the planner chooses for the number
    of processes; not given: one per process that torchrun or accelerate launch started, or per replicas of them."""

    num_micro_batches: Annotated[Count | Annotated[str, OneOf((AUTO,))], OR_NULL] = None  # type: ignore[assignment]
    """M: number of micro-batches that a mini-batch is split into; a mini-batch of fewer rows gives one per row; auto:
    the planner chooses; null: auto, or 1 where nothing can be planned."""

    schedule: Annotated[str, OneOf((*TRAINING_SCHEDULES, AUTO), TABLE_SUFFIX), OR_NULL] = None  # type: ignore[assignment]
    """Order of work. gpipe: as in the paper; gpipe_fused: the last stage runs each backward right after its forward;
    1f1b: least memory; interleaved_1f1b: several stages per process, assigned in turn; breadth_first: the same, each
    stage running all micro-batches before the next; zb_h1: 1f1b with a split
    backward, a third of its bubble in its memory; zb_h2: twice the memory, no bubble between steps that do not wait
    for each other; zb_v: two stages per process in a V, a sixth of 1f1b's bubble in its memory;
    v_half: the same in half of it, with half of 1f1b's bubble; vocab_1f1b and vocab_gpipe: 1f1b and gpipe with the head
    divided by the vocabulary over all stages; naive: no pipelining; auto: the planner chooses one of
    these, but not naive, or makes a table for the memory there is; or the file of a table of your own, such as
    tables/mine.txt, whose R actions are the recomputations (python -m hf_gpipe plan RECIPE --table writes one).
    Asynchronous, with other numbers than the
    plain model: pipedream: each stage updates after each step and nothing waits for the pipeline to empty, the
    backward of a micro-batch uses the weights of its forward; pipedream_vertical: all stages use the version of the
    weights that the first one used; pipedream_2bw: the version before the last one; pipedream_naive: no version is
    kept, so that backwards use other weights than their forwards. null: auto, or gpipe where nothing can be planned."""

    recompute: Annotated[Annotated[str, OneOf((*_MODES, AUTO))] | _Entries, OR_NULL, _Listed] = None  # type: ignore[assignment]
    """The activations that are recomputed in backward, not kept. none: nothing; block: the inside of each block; stage:
    all but the stage's input; auto: for each stage as little as `memory` allows. Or a list with one entry per stage, in
    which a number is the most autograd graphs that the stage keeps alive. null: auto, or stage where nothing can be
    planned."""

    partition: Annotated[Annotated[str, OneOf(PARTITIONS)] | tuple[Count, ...], OR_NULL, _Listed] = None  # type: ignore[assignment]
    """How layers are divided among stages. count: equal numbers, give or take one; parameters, flops, profile: minimise
    the largest stage by parameters, by operations, or by the time measured before training; auto: minimise the
    planner's estimate of time; or the number of layers of each stage, such as [3, 4, 2]; null: auto, or count where
    nothing can be planned."""

    memory: Annotated[Text | tuple[Text, ...] | None, _Listed] = None
    """The memory limit of each process that the planner plans for, with a unit, such as 80GiB; or a list with one limit
    per process, such as [24GiB, 12GiB]; null: the memory of its device."""

    speeds: Annotated[tuple[Positive, ...] | Annotated[str, OneOf(("profile",))] | None, _Listed] = None
    """The relative speed of each process, for the planner, such as [1, 0.5] where the second is half as fast. profile:
    measured before training, by a block of the model. null: measured where the processes have GPUs of different models,
    layers are not divided and something is left to the planner; otherwise all are equally fast."""

    replicas: Annotated[Count | Annotated[str, OneOf((AUTO,))] | tuple[Count, ...], _Listed] = 1
    """Number of replicas of each stage, which take the micro-batches in turn and add up their gradients: 2 is two
    pipelines side by side. Or a list with one number per stage, such as [2, 1]; auto: the planner chooses for the
    number of processes."""

    tensor_parallel: Count = 1
    """T: number of processes that divide the layers of each stage among them (tensor parallelism), each with a device
    of its own. Each of `num_processes`, and of `placement`, is then T processes, whose ranks follow each other."""

    sequence_parallel: bool = False
    """With `tensor_parallel`: whether each of the T processes has a part of the positions alone between the divided
    layers, where norms, dropout and residuals are, so that these keep 1/T of the memory. About half as many bytes more
    are sent."""

    placement: Text | None = None
    """The processes of each stage, those of its replicas with commas, such as "0,2 1,3" for two stages with two
    replicas; null: the processes of a pipeline follow each other, or those of a stage if `replicas` is a list of
    different numbers."""

    zero: Literal[0, 1] = 0
    """1: of the optimizer's state, and of float32 master weights, each replica of a stage keeps a part alone, updates
    its part of the weights, and gets the rest from the others (ZeRO-1); 0: each replica keeps and updates all. With
    `replicas` auto, 1 counts where the planner chooses replicas."""

    sequence_chunks: Count | Annotated[str, OneOf((AUTO,), CHUNK_UNIT)] = 1
    """Into how many chunks of tokens the rows are cut in training, which go through the stages one after another, each
    as a micro-batch would: for long rows, of which a mini-batch has few. For decoder-only models whose layers keep
    nothing of earlier tokens but keys and values. Evaluation and generation do not cut rows. 1: rows are whole; auto:
    the planner chooses; or the most tokens of a chunk, such as 4096 tokens, by which the longest rows are cut."""

    chunk_taper: NotNegative | Annotated[str, OneOf((AUTO,))] = 0.0
    """How much shorter later chunks are. 0: all are equally long, which takes the least memory. R: each chunk takes as
    long where the last token of a row takes 1 + R times as long as the first, for it attends to more tokens; the first
    chunk is then the longest, and decides the memory. auto: the planner chooses between 0 and what its costs say."""

    offload_weights: Visitors | Annotated[str, OneOf((AUTO,))] | None = None
    """Weights that stay in CPU memory and visit the device of their stage for each run of its actions, so
    that a device holds two stages of them and no more: for models larger than all devices together. frozen: those that
    are not trained, such as those under LoRA adapters; all: trained ones too, whose gradients go to the host, where the
    optimizer updates them. It takes at least three stages per device, `recompute: stage`, and by default
    `schedule: breadth_first`, in which each stage visits twice. `schedule: round_robin`, with all, deals the stages to
    the processes of a machine. On the CPU frozen weights stay in the checkpoint's
    files. auto: the planner chooses, also whether any weights visit. null: all weights stay on their devices."""

    boundary_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The type in which hidden states and their gradients are sent from stage to stage, narrower than the model's, for
    slow links; it rounds them. null: the model's type, and nothing is rounded."""

    num_processes: Count | None = None
    """Number of processes that share the stages; null: one per replica of a stage, but at most one per GPU, or one for
    each of `devices`; with `replicas` or `num_stages` auto one per GPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The type of device that stages run on; auto: GPUs if there are any."""

    devices: Annotated[tuple[Text, ...] | None, _Listed] = None
    """Devices of this machine, divided evenly among the processes, such as [cuda:0, cuda:1]; a process spreads its
    stages over its devices. null: one device per process, of the type of `device`."""

    torch_compile: bool = False
    """Whether to compile each block with torch.compile."""

    torch_compile_backend: Text | None = None
    """The backend of torch.compile; null: its default, inductor."""

    timeout_seconds: Positive = 1800.0
    """How many seconds a process waits for another one before the run fails; six times as long for one that writes a
    checkpoint and says that it is still there."""

    measure_links: bool = False
    """Whether the links between the processes are measured before the model is made, also where all are on one machine.
    Between machines they always are."""

    threads_per_process: Count | None = None
    """CPU threads per process; null: OMP_NUM_THREADS, or the machine's cores divided evenly."""

    def __post_init__(self) -> None:
        if vars(self)["num_stages"] is None:
            object.__setattr__(self, "num_stages", self._stages_of_processes())
        if self.is_mesh_open:
            self._check_open_mesh()
        else:
            self._check_mesh()
        for name, value in (("partition", self.partition), ("recompute", self.recompute)):
            if isinstance(value, tuple) and len(value) != self.num_stages:
                raise UserError(
                    f"{name} {list(value)} has {len(value)} entries and num_stages is {self.num_stages}; give one "
                    "entry for each stage."
                )
        for name, of_processes in (("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(of_processes, tuple) and self.num_processes not in (None, len(of_processes)):
                raise UserError(
                    f"{name} {list(of_processes)} has {len(of_processes)} entries and num_processes is "
                    f"{self.num_processes}; give one entry for each process."
                )
        if self.devices == ():
            raise UserError("devices [] is empty; name at least one device, or leave it out.")
        if self.torch_compile_backend is not None and not self.torch_compile:
            raise UserError(
                f"torch_compile_backend is {self.torch_compile_backend!r} and torch_compile is false; set "
                "torch_compile to true, or leave the backend out."
            )
        if self.schedule in ASYNCHRONOUS_SCHEDULES:
            self._check_asynchronous()
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()
        elif self.sequence_parallel:
            raise UserError(
                "sequence_parallel is true and tensor_parallel is 1, so nothing has parts of the positions; give "
                "tensor_parallel, or leave sequence_parallel out."
            )
        if isinstance(self.sequence_chunks, str):
            self.most_chunk_tokens  # noqa: B018  # raises for a text that is no number
            if is_table_file(self.schedule):
                raise UserError(
                    f"sequence_chunks is {self.sequence_chunks!r} and schedule is {self.schedule}, a table of so many "
                    "chunks as it says; give that number as sequence_chunks."
                )
        if self.chunk_taper != 0 and not self.cuts_rows:
            raise UserError(
                f"chunk_taper is {self.chunk_taper} and sequence_chunks is 1, so rows are whole; give sequence_chunks, "
                "or leave chunk_taper out."
            )
        if self.chunk_taper == AUTO and self.partition == "profile":
            raise UserError(
                "chunk_taper is auto and partition is profile, which measures chunks of one length; give a number, "
                "such as 0, or partition auto."
            )
        if self.offload_weights == AUTO and is_table_file(self.schedule):
            raise UserError(
                f"offload_weights is auto and schedule is {self.schedule}, a table; give the weights that visit under "
                "it, or leave offload_weights out."
            )
        if self.schedule in DEALT and self.offload_weights not in ("all", AUTO):
            raise UserError(
                f"schedule is {self.schedule} and offload_weights {self.offload_weights or 'null'}: its stages are "
                "dealt to all processes, so all weights visit, adapters too; set offload_weights to all, or use "
                "another schedule."
            )
        without_chunks = (*DIVIDED_HEAD, *DEALT)
        if self.cuts_rows and self.schedule in (*ASYNCHRONOUS_SCHEDULES, *without_chunks):
            others = [name for name in SYNCHRONOUS_SCHEDULES if name not in without_chunks]
            raise UserError(
                f"sequence_chunks is {self.sequence_chunks} and schedule is {self.schedule}, which has no order for "
                f"rows that are cut into chunks; use one of {', '.join(others)}, or leave sequence_chunks out."
            )
        self.memory_bytes  # noqa: B018  # raises for a text that is no size

    def _check_tensor_parallel(self) -> None:
        """Raise UserError for what divided layers do not go with, and for what the planner would choose."""
        size = self.tensor_parallel
        if self.schedule in ASYNCHRONOUS_SCHEDULES:
            raise UserError(
                f"tensor_parallel is {size} and schedule is {self.schedule}, which do not go together; leave one of "
                "them out."
            )

    def _check_asynchronous(self) -> None:
        """Raise UserError for what an asynchronous schedule cannot run with."""
        if self.is_mesh_open:
            name = "num_stages" if self.num_stages == AUTO else "replicas"
            raise UserError(
                f"schedule is {self.schedule} and {name} is auto; give {name}, for with it the numbers of an "
                "asynchronous schedule change."
            )
        if self.zero:
            raise UserError(
                f"schedule is {self.schedule} and zero is {self.zero}: replicas share the whole step of an optimizer, "
                "and here each stage updates by itself; use zero 0, or a synchronous schedule, such as 1f1b."
            )
        if self.torch_compile:
            raise UserError(
                f"schedule is {self.schedule} and torch_compile is true: compiled blocks would not see the versions of "
                "the weights that the schedule keeps; leave torch_compile out, or use a synchronous schedule."
            )

    def _stages_of_processes(self) -> int:
        """`num_stages` where it is not given: by the lists that have an entry per stage, or by the processes."""
        for of_stages in (self.partition, self.recompute, self.replicas):
            if isinstance(of_stages, tuple) and of_stages:
                return len(of_stages)
        if self.replicas == AUTO:
            return 1
        num_processes = self.num_processes or int(os.environ.get("WORLD_SIZE", "1")) // self.tensor_parallel
        return max(1, num_processes // self.replicas) if isinstance(self.replicas, int) else 1

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
    def is_decided(self) -> bool:
        """Whether nothing is left to the planner."""
        open_values = AUTO in (self.num_micro_batches, self.schedule, self.recompute, self.chunk_taper)
        open_values = open_values or self.offload_weights == AUTO
        open_values = open_values or isinstance(self.sequence_chunks, str)
        return not (open_values or self.not_given or self.is_cut_by_cost or self.is_mesh_open)

    @property
    def divides_head(self) -> bool:
        """Whether the schedule divides the head over the stages."""
        return self.schedule in DIVIDED_HEAD

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


@section()
class DecidedConfig(PipelineConfig):
    """A `PipelineConfig` that leaves nothing to the planner: what is run, and what a plan describes."""

    num_stages: Count
    num_micro_batches: Count
    schedule: Annotated[str, OneOf(TRAINING_SCHEDULES, TABLE_SUFFIX)]
    replicas: Annotated[Count | tuple[Count, ...], _Listed] = 1
    recompute: Annotated[Annotated[str, OneOf(_MODES)] | _Entries, _Listed]
    partition: Annotated[tuple[Count, ...], _Listed]
    num_processes: Count
    sequence_chunks: Count = 1
    chunk_taper: NotNegative = 0.0
    offload_weights: Visitors | None = None
    speeds: Annotated[tuple[Positive, ...] | None, _Listed] = None

    def replaced(self, **values: Any) -> PipelineConfig:
        """A copy with `values`, which may leave something to the planner again."""
        return PipelineConfig(**{**vars(self), **values})
