"""Schedules whose head is divided by the vocabulary over the stages (vocabulary parallelism, arXiv 2411.05288)."""

from __future__ import annotations

from functools import partial

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.basic import alternating
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, LOGITS, LOGITS_GRADIENT
from hf_gpipe.schedule.named import SCHEDULES, NamedSchedule
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, merge_with_recomputations


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
    vocab_gpipe=_vocabulary_schedule(vocab_gpipe),
    vocab_1f1b=_vocabulary_schedule(vocab_1f1b),
    vocab_forward_only=_vocabulary_schedule(vocab_forward_only, is_for_training=False),
)
