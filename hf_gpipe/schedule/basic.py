"""The schedules of GPipe and of PipeDream-Flush, and forwards alone.

In the drawings a row is a stage, which has a process of its own where nothing else is said, and a column is one tick. A
forward or a recomputation takes one tick, and a backward takes two, of which the second is drawn as "--". A stage is
idle where ".." stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, ActionKind
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations

_forward, _backward = partial(Action, FORWARD), partial(Action, BACKWARD)


def naive(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """One micro-batch after another, through all stages and back, without pipelining.

    K = 3, M = 2, without recomputation:

        stage 0  F0 .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. B1 --
        stage 1  .. F0 .. .. .. B0 -- .. .. .. F1 .. .. .. B1 -- .. ..
        stage 2  .. .. F0 B0 -- .. .. .. .. .. .. F1 B1 -- .. .. .. ..
    """
    orders = [_one_group_after_another(s, num_micro_batches, placement) for s in range(placement.num_stages)]
    return merge_with_recomputations(orders, placement, limits)


def _one_group_after_another(stage: int, num_micro_batches: int, placement: Placement) -> list[Action]:
    """The order of a stage that runs the backwards of a micro-batch, or of a group, right after its forwards."""
    order: list[Action] = []
    for group in placement.groups_of(range(num_micro_batches)):
        order += [_forward(stage, m) for m in group] + [_backward(stage, m) for m in reversed(group)]
    return order


def gpipe(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """All forwards, then all backwards in reverse order (GPipe, arXiv 1811.06965, section 2.3 and figure 2c).

    K = 3, M = 3, without recomputation and with it:

        stage 0  F0 F1 F2 .. .. .. .. .. .. B2 -- B1 -- B0 --
        stage 1  .. F0 F1 F2 .. .. .. B2 -- B1 -- B0 -- .. ..
        stage 2  .. .. F0 F1 F2 B2 -- B1 -- B0 -- .. .. .. ..

        stage 0  F0 F1 F2 R2 .. .. .. .. .. .. B2 -- R1 B1 -- R0 B0 --
        stage 1  .. F0 F1 F2 R2 .. .. .. B2 -- R1 B1 -- R0 B0 -- .. ..
        stage 2  .. .. F0 F1 F2 R2 B2 -- R1 B1 -- R0 B0 -- .. .. .. ..

    With equal stages, free transfers and no recomputation the bubble is (K-1)/(M+K-1). Recomputation does not lengthen
    the fill and the drain of the pipeline: a stage begins it while it waits for its first gradient (see
    `hf_gpipe.schedule.simulate` for the formula).
    """
    micro_batches = range(num_micro_batches)
    orders = [
        [_forward(s, m) for m in micro_batches] + [_backward(s, m) for m in reversed(micro_batches)]
        for s in range(placement.num_stages)
    ]
    return merge_with_recomputations(orders, placement, limits)


def gpipe_fused(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """GPipe whose last stage runs each micro-batch's backward right after its forward.

    The last stage recomputes nothing and keeps one micro-batch's logits. The other stages run all forwards first; the
    gradients that come early wait there, and they run their backwards in the order in which the gradients arrive.

    K = 3, M = 3, with recomputation:

        stage 0  F0 F1 F2 R0 .. .. .. B0 -- R1 B1 -- R2 B2 --
        stage 1  .. F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. ..
    """
    last = placement.num_stages - 1
    micro_batches = range(num_micro_batches)
    orders = [
        [_forward(s, m) for m in micro_batches] + [_backward(s, m) for m in placement.backward_order(micro_batches)]
        for s in range(last)
    ]
    orders.append(_one_group_after_another(last, num_micro_batches, placement))
    return merge_with_recomputations(orders, placement, fused_last(limits))


def one_forward_one_backward(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """1F1B: a stage alternates one forward and one backward (PipeDream, arXiv 1806.03377), here with the flush that
    keeps GPipe's semantics (PipeDream-Flush, arXiv 2006.09503).

    Stage s starts with K-s-1 forwards, so it holds at most K-s micro-batches, however many there are. The bubble is
    gpipe's. The last stage has its gradient at hand and recomputes nothing.

    With replicas this is PipeDream's 1F1B-RR: a replica of stage s holds at most n / r micro-batches, rounded up, where
    r is the number of the stage's replicas and n that of all replicas of stages s to K-1. It is K-s where all stages
    have as many.

    In groups of c micro-batches the first backward is that of a group's last one, so a stage starts with c-1
    forwards more (Seq1F1B, arXiv 2406.03488, section 3).

    K = 3, M = 4, without recomputation and with it:

        stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

        stage 0  F0 F1 F2 R0 .. .. .. B0 -- F3 R1 B1 -- R2 .. B2 -- R3 B3 --
        stage 1  .. F0 F1 R0 .. B0 -- F2 R1 B1 -- F3 R2 B2 -- R3 B3 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. F3 B3 -- .. .. .. .. ..
    """
    return merge_with_recomputations(alternating(num_micro_batches, placement), placement, fused_last(limits))


def alternating(num_micro_batches: int, placement: Placement, more: int = 0) -> list[list[Action]]:
    """The order of each stage in 1F1B, with so many forwards `more` than it needs before the first backward."""
    orders: list[list[Action]] = []
    for stage, workers in enumerate(placement.workers):
        ahead = forwards_ahead(placement, stage) + more
        replicas = (placement.micro_batches_of(stage, process, num_micro_batches) for process in workers)
        every = (one_with_each(stage, own, placement.backward_order(own), ahead) for own in replicas)
        orders.append([action for order in every for action in order])
    return orders


def one_with_each(
    stage: int, forwards: Sequence[int], backwards: Sequence[int], ahead: int, kind: ActionKind = BACKWARD
) -> list[Action]:
    """The order of a stage that runs so many forwards `ahead`, and then one with each backward, which is of a kind."""
    waiting = [_forward(stage, m) for m in forwards]
    return in_turn(waiting, [Action(kind, stage, m) for m in backwards], lambda index: index + ahead + 1)


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], before: Callable[[int], int]) -> list[Action]:
    """Forwards and backwards, each in their order: `before` says how many forwards come before a backward, by its
    index."""
    order: list[Action] = []
    done = 0
    for index, backward in enumerate(backwards):
        until = max(done, before(index))
        order += [*forwards[done:until], backward]
        done = until
    return order


def forwards_ahead(placement: Placement, stage: int) -> int:
    """The forwards that a replica of a stage runs in 1F1B before it runs each forward with one backward.

    Of all replicas from this stage on it is the share of one replica of the stage, rounded up, less one. Without
    replicas it is K-s-1. Of a group of c the last one's backward is first, so it is c-1 more; where stages differ
    in their replicas, a later stage takes whole rows from them in turn, so it is the share in rows.
    """
    in_flight = -(-sum(placement.replicas[stage:]) // len(placement.workers[stage]))
    size = placement.group_size
    return in_flight * size - 1 if len(set(placement.replicas)) > 1 else in_flight - 1 + size - 1


def forward_only(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Evaluation: forwards only, no update. `recompute` has nothing to act on.

    K = 3, M = 3:

        stage 0  F0 F1 F2 .. ..
        stage 1  .. F0 F1 F2 ..
        stage 2  .. .. F0 F1 F2
    """
    orders = [[_forward(s, m) for m in range(num_micro_batches)] for s in range(placement.num_stages)]
    return merge_with_recomputations(orders, placement, limits)
