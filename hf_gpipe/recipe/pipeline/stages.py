"""The keys of `pipeline` that say how the model and its mini-batches are cut, and in which order they run."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator

from hf_gpipe.errors import UserError
from hf_gpipe.partition import COST_STRATEGIES, COUNT
from hf_gpipe.recipe.section import OR_NULL, Count, OneOf, given_not_with, section
from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES, DIVIDED_HEAD, SCHEDULES, TABLE_SUFFIX

AUTO = "auto"
SYNCHRONOUS_SCHEDULES = tuple(name for name in SCHEDULES if not name.endswith("forward_only"))
TRAINING_SCHEDULES = (*SYNCHRONOUS_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
PARTITIONS = (COUNT, *COST_STRATEGIES, AUTO)

#: What the planner chooses where it is not given, and what it is where nothing can be planned.
PLANNED = {"num_micro_batches": 1, "schedule": "gpipe", "recompute": "stage", "partition": "count"}

RecomputeChoice: TypeAlias = str | tuple[str | int, ...]
"""A decided `recompute`: one of MODES, or for each stage one of these or the most graphs to keep."""

MODES = ("none", "block", "stage", "host")
Entries = tuple[Annotated[str, OneOf(MODES)] | Count, ...]
Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list | range) else value)

#: What keys are marked with that do not go with it.
ASYNCHRONOUS, HEAD_IN_PARTS, DEALT_STAGES, TEACHER = "asynchronous", "head in parts", "dealt stages", "teacher"


@section(kw_only=False)
class StageKeys:
    """How the model and its mini-batches are cut, and in which order they run."""

    num_stages: Count | Annotated[str, OneOf((AUTO,))] = None  # type: ignore[assignment]  # until it is made
    """K: number of consecutive stages that the model's layers are split into; auto: the planner chooses for the number
    of processes; not given: the number of processes that torchrun or accelerate launch started, divided by the
    replicas."""

    num_micro_batches: Annotated[Count | Annotated[str, OneOf((AUTO,))], OR_NULL] = None  # type: ignore[assignment]
    """M: number of micro-batches that a mini-batch is split into; a mini-batch with fewer rows is split into single
    rows; auto: the planner chooses; null: auto, or 1 where nothing can be planned."""

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
    """The activations that are recomputed in the backward instead of being kept. none: nothing; block: the inside of
    each block; stage: everything but the stage's input; host: nothing, and activations wait in CPU memory between
    forward and backward; auto: for each stage as little as `memory` allows. Or a list with one entry per stage, in
    which a number is the most micro-batches whose activations the stage keeps. null: auto, or stage where nothing can
    be planned."""

    partition: Annotated[Annotated[str, OneOf(PARTITIONS)] | tuple[Count, ...], OR_NULL, Listed] = None  # type: ignore[assignment]
    """How layers are divided among stages. count: equal numbers, give or take one; parameters, flops, profile: the
    largest stage is as small as possible by parameters, by operations, or by the time measured before training; auto:
    by the planner's estimate of time; or the number of layers of each stage, such as [3, 4, 2]; null: auto, or count
    where nothing can be planned."""

    def check(self) -> None:
        """Raise UserError where keys contradict each other; the message has both, and what to do."""
        for name, value in (("partition", self.partition), ("recompute", self.recompute)):
            if isinstance(value, tuple) and self.num_stages not in (AUTO, len(value)):
                raise UserError(
                    f"{name} {list(value)} has {len(value)} entries and num_stages is {self.num_stages}; give one "
                    "entry for each stage."
                )

    def check_beside(self, other: str) -> None:
        """Raise UserError for a key that is marked as going with something else by its default alone."""
        beside, way = f"schedule is {self.schedule}", ", or use another schedule, such as 1f1b"
        if other == TEACHER:
            beside, way = "there is a teacher", ""
        for name, value, why in given_not_with(self, other):
            shown = str(value).lower()
            raise UserError(f"{beside} and {name} is {shown}, which do not go together{why}; leave {name} out{way}.")

    def is_open(self, name: str) -> bool:
        """Whether the planner chooses the value of a key that it may choose."""
        return bool(getattr(self, name) == AUTO)

    @property
    def divides_head(self) -> bool:
        """Whether the schedule divides the head over the stages."""
        return self.schedule in DIVIDED_HEAD

    @property
    def is_cut_by_cost(self) -> bool:
        """Whether the planner cuts the model, or may do so."""
        return self.partition in (None, AUTO, *COST_STRATEGIES)
