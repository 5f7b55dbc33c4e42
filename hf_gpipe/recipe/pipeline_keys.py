"""The keys of the section `pipeline`, and the values that they have."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field

from hf_gpipe.partition import COST_STRATEGIES, COUNT
from hf_gpipe.recipe.section import OR_NULL, Count, NotNegative, OneOf, Positive, Text, section
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES, SCHEDULES, TABLE_SUFFIX

AUTO = "auto"
#: About thirty years: longer times are none to a clock.
MOST_SECONDS = 10**9
SYNCHRONOUS_SCHEDULES = tuple(name for name in SCHEDULES if not name.endswith("forward_only"))
TRAINING_SCHEDULES = (*SYNCHRONOUS_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
CHUNK_UNIT = " tokens"
PARTITIONS = (COUNT, *COST_STRATEGIES, AUTO)
#: Keys that may have another value in each process.
OF_EACH_PROCESS = ("device", "devices", "threads_per_process", "memory")
#: Keys of a run that a plan does not have.
OF_THE_RUN = (*OF_EACH_PROCESS, "speeds", "torch_compile", "torch_compile_backend", "timeout_seconds", "measure_links")
Visitors = Literal["frozen", "all"]
"""The weights that visit their device: those that are not trained, or all but trained ones that stages may share."""

#: What the planner chooses where it is not given, and what it is where nothing can be planned.
PLANNED = {"num_micro_batches": 1, "schedule": "gpipe", "recompute": "stage", "partition": "count"}

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""A decided `recompute`: one of MODES, or for each stage one of these or the most graphs to keep."""


class Division(NamedTuple):
    """How the layers of each stage are divided (tensor parallelism).

    Attributes:
        num_ranks: T, among which they are divided.
        divides_rows: whether each rank has a part of the positions between divided layers.
    """

    num_ranks: int = 1
    divides_rows: bool = False


class Chunks(NamedTuple):
    """How rows are cut: into at most so many chunks of tokens, and how much shorter later ones are."""

    most: int = 1
    taper: float = 0.0

    def within(self, tokens: int) -> Chunks:
        """The same for rows of so many tokens: a chunk has at least one."""
        return self._replace(most=min(self.most, tokens))


MODES = ("none", "block", "stage", "host")
Entries = tuple[Annotated[str, OneOf(MODES)] | Count, ...]
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)


@section(kw_only=False)
class PipelineKeys:
    """The keys of `PipelineConfig`."""

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

    recompute: Annotated[Annotated[str, OneOf((*MODES, AUTO))] | Entries, OR_NULL, Listed] = None  # type: ignore[assignment]
    """The activations that are recomputed in backward, not kept. none: nothing; block: the inside of each block; stage:
    all but the stage's input; host: nothing, and they are in CPU memory between forward and backward; auto: for each
    stage as little as `memory` allows. Or a list with one entry per stage, in which a number is the most autograd
    graphs that the stage keeps alive. null: auto, or stage where nothing can be planned."""

    partition: Annotated[Annotated[str, OneOf(PARTITIONS)] | tuple[Count, ...], OR_NULL, Listed] = None  # type: ignore[assignment]
    """How layers are divided among stages. count: equal numbers, give or take one; parameters, flops, profile: minimise
    the largest stage by parameters, by operations, or by the time measured before training; auto: minimise the
    planner's estimate of time; or the number of layers of each stage, such as [3, 4, 2]; null: auto, or count where
    nothing can be planned."""

    memory: Annotated[Text | tuple[Text, ...] | None, Listed] = None
    """The memory limit of each process that the planner plans for, with a unit, such as 80GiB; or a list with one limit
    per process, such as [24GiB, 12GiB]; null: the memory of its device."""

    speeds: Annotated[tuple[Positive, ...] | Annotated[str, OneOf(("profile",))] | None, Listed] = None
    """The relative speed of each process, for the planner, such as [1, 0.5] where the second is half as fast. profile:
    measured before training, by a block of the model. null: measured where the processes have GPUs of different models
    and something is left to the planner; otherwise all are equally fast."""

    replicas: Annotated[Count | Annotated[str, OneOf((AUTO,))] | tuple[Count, ...], Listed] = 1
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

    devices: Annotated[tuple[Text, ...] | None, Listed] = None
    """Devices of this machine, divided evenly among the processes, such as [cuda:0, cuda:1]; a process spreads its
    stages over its devices. null: one device per process, of the type of `device`."""

    torch_compile: bool = False
    """Whether to compile each block with torch.compile."""

    torch_compile_backend: Text | None = None
    """The backend of torch.compile; null: its default, inductor."""

    timeout_seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 1800.0
    """How many seconds a process waits for another one before the run fails; six times as long for one that writes a
    checkpoint and says that it is still there."""

    measure_links: bool = False
    """Whether the links between the processes are measured before the model is made, also where all are on one machine.
    Between machines they always are."""

    threads_per_process: Count | None = None
    """CPU threads per process; null: OMP_NUM_THREADS, or the machine's cores divided evenly."""
