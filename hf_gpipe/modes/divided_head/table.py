"""The actions S and T, and schedules whose head is divided by the vocabulary over the stages (vocabulary parallelism,
arXiv 2411.05288, section 4).

    S  makes the logits of the stage's part of the vocabulary. The last stage sends the hidden states to all others, and
       each sends back the few sums that the loss needs of its part. S of the last stage receives all sums and computes
       the loss
    T  takes the sums over the whole vocabulary from S of the last stage, adds to the gradients of the stage's part of
       the head, and sends what this part adds to the gradient of the hidden states to the last stage, whose B begins
       from that
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.basic import alternating
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, ActionKind, Fault, add_kind
from hf_gpipe.schedule.messages import Link, links_of
from hf_gpipe.schedule.named import SCHEDULES, NamedSchedule
from hf_gpipe.schedule.placement import Placement, edges_between
from hf_gpipe.schedule.recompute import Limits, merge_with_recomputations
from hf_gpipe.schedule.table import Schedule

#: What a stage holds: the hidden states that S receives; the logits of its part of the vocabulary with their hidden
#: states, from the end of S to the end of T; and the working memory of S or T.
HEAD_INPUT, HELD_LOGITS, HEAD_WORKING = "head input", "logits", "head"
_RULE = "where the head is divided, each stage has S and in training T of each micro-batch."


def _sources(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions of other stages whose messages about the head an action receives."""
    last, m = num_stages - 1, action.micro_batch
    if m is None:
        return ()
    if action.stage < last:
        source = {LOGITS: FORWARD, LOGITS_GRADIENT: LOGITS}.get(action.kind)
        return () if source is None else (Action(source, last, m),)
    of_all = LOGITS if action.kind == LOGITS else LOGITS_GRADIENT if action.kind.takes_gradient else None
    return () if of_all is None else tuple(Action(of_all, stage, m) for stage in range(last))


def faults(schedule: Schedule) -> Iterator[Fault]:
    """Shared stages have no parts of the head."""
    if LOGITS in schedule.kinds and schedule.placement.is_shared:
        yield "its stages are shared, so it has no S and T.", 0


LOGITS = add_kind(
    ActionKind(
        "S",
        "logits",
        (),
        "forward",
        "#7d8fd1",
        ticks=Fraction(1, 4),
        needs=(FORWARD,),
        way=0,
        turn=1,
        sources=_sources,
        evaluation="vocab_forward_only",
        rule=_RULE,
        is_optional=True,
        in_training_only=False,
        receives=HEAD_INPUT,
        makes=HELD_LOGITS,
        frees=(HEAD_INPUT,),
        working=HEAD_WORKING,
    )
)
LOGITS_GRADIENT = add_kind(
    ActionKind(
        "T",
        "gradient of logits",
        (),
        "backward",
        "#3d5a9e",
        "white",
        ticks=Fraction(1, 2),
        needs=(LOGITS,),
        needed_by=(BACKWARD, INPUT),
        after_update=True,
        way=0,
        turn=2,
        rule=_RULE,
        is_optional=True,
        frees=(HELD_LOGITS,),
        working=HEAD_WORKING,
    )
)


def head_edges(placement: Placement) -> tuple[tuple[int, int, int], ...]:
    """The pairs of workers that exchange messages about the head: (stage, its worker, the last stage's)."""
    return edges_between((own, placement.workers[-1]) for own in placement.workers[:-1])


def head_communicators(placement: Placement) -> tuple[Link, ...]:
    """The links of these messages, as `communicators` has those of the others."""
    return links_of(placement, ((*edge, placement.num_stages - 1) for edge in head_edges(placement)))


def vocab_gpipe(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """GPipe with the head divided over the stages (vocabulary parallelism, arXiv 2411.05288): `_with_divided_head`.

    The backwards are in the order of the forwards: the last stage has the gradients in the order in which it has the
    hidden states.

    K = 3, M = 3, without recomputation; S takes one tick, T two:

        stage 0  F0 F1 F2 S0 S1 .. T0 -- S2 T1 -- T2 -- .. .. .. .. .. B0 -- B1 -- B2 --
        stage 1  .. F0 F1 F2 S0 S1 T0 -- S2 T1 -- T2 -- .. .. .. B0 -- B1 -- B2 -- .. ..
        stage 2  .. .. F0 F1 F2 S0 S1 T0 -- S2 T1 -- T2 -- B0 -- B1 -- B2 -- .. .. .. ..
    """
    micro_batches = range(num_micro_batches)
    stages = range(placement.num_stages)
    orders = [[Action(kind, s, m) for kind in (FORWARD, BACKWARD) for m in micro_batches] for s in stages]
    return _with_divided_head(orders, num_micro_batches, placement, limits)


def vocab_1f1b(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """1F1B with the head divided over the stages (vocabulary parallelism, arXiv 2411.05288): `_with_divided_head`.

    Between F and B of the last stage all stages run S, and then all run T. So a stage has two micro-batches more under
    way than in 1f1b, however many stages there are.

    K = 3, M = 4, without recomputation; S takes one tick, T two:

        stage 0  F0 F1 F2 F3 S0 S1 .. T0 -- S2 T1 -- .. .. .. .. S3 T2 -- B0 -- T3 -- B1 -- .. .. B2 -- B3 --
        stage 1  .. F0 F1 F2 F3 S0 S1 T0 -- S2 T1 -- .. .. .. B0 -- S3 T2 -- B1 -- T3 -- .. B2 -- B3 -- .. ..
        stage 2  .. .. F0 F1 F2 .. S0 S1 T0 -- S2 T1 -- B0 -- F3 B1 -- S3 T2 -- T3 -- B2 -- B3 -- .. .. .. ..
    """
    return _with_divided_head(alternating(num_micro_batches, placement, more=2), num_micro_batches, placement, limits)


def vocab_forward_only(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Evaluation with the head divided over the stages.

    K = 3, M = 3:

        stage 0  F0 F1 F2 S0 S1 S2 .. ..
        stage 1  .. F0 F1 F2 S0 S1 S2 ..
        stage 2  .. .. F0 F1 F2 S0 S1 S2
    """
    orders = [[Action(FORWARD, s, m) for m in range(num_micro_batches)] for s in range(placement.num_stages)]
    return _with_divided_head(orders, num_micro_batches, placement, limits)


def _with_divided_head(
    orders: list[list[Action]], num_micro_batches: int, placement: Placement, limits: Limits
) -> list[list[Action]]:
    """The order of each process, from that of each stage, with S and in training T in the gaps.

    A part of the head is like one more stage of the process, so `clock.merge` puts its actions where they can run. Each
    replica runs S of one micro-batch before T of the one before it, so that it does not wait for the other stages; then
    it has the logits of two.
    """
    is_training = any(action.kind.takes_gradient for action in orders[0])
    heads: list[list[Action]] = []
    for s, ahead in enumerate(placement.replicas):
        heads.append([])
        for m in range(num_micro_batches + ahead):
            heads[-1] += [Action(LOGITS, s, m)] if m < num_micro_batches else []
            heads[-1] += [Action(LOGITS_GRADIENT, s, m - ahead)] if is_training and m >= ahead else []
    return merge_with_recomputations([*orders, *heads], placement, limits)


_vocabulary_schedule = partial(NamedSchedule, takes_groups=False, same_replicas="needs each stage's part of the head")
#: The schedules that train.
DIVIDED_HEAD = ("vocab_1f1b", "vocab_gpipe")
SCHEDULES.update(
    vocab_gpipe=_vocabulary_schedule(vocab_gpipe, text="gpipe with the head divided by the vocabulary over all stages"),
    vocab_1f1b=_vocabulary_schedule(vocab_1f1b, text="1f1b with the head divided so"),
    vocab_forward_only=_vocabulary_schedule(vocab_forward_only, is_for_training=False),
)
