"""Chooses the micro-batches that a stage recomputes, so that it never keeps more autograd graphs alive than a limit.

A graph lives from the start of the forward that keeps it, or of the recomputation R that makes it anew, to the end of
its backward: B, or I where the backward is split. Every backward needs its graph, so each backward takes one of the
places that the limit allows; a forward that keeps its graph holds a place from then on. An R stands directly before its
backward in the order of its stage, so it holds a place for no other action's length.

Where a stage reaches its limit, one of the kept graphs has to go. The best choice is the graph whose backward comes
last, because it would hold its place longest. Chosen so from the first action to the last, the recomputations are the
fewest possible (it is the greedy choice for the largest set of intervals of which at most a given number overlap;
Faigle and Nawijn, Discrete Applied Mathematics 58, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.clock import by_worker, merge
from hf_gpipe.schedule.kinds import FORWARD, RECOMPUTE
from hf_gpipe.schedule.placement import Placement

Limits: TypeAlias = tuple[int | None, ...]
"""The most graphs alive at once, for each stage. None: no limit, so no R; 0: R before every B or I, needed or not."""


def fused_last(limits: Limits) -> Limits:
    """Let the last stage keep one graph under "stage" too: its gradient is available as soon as its forward ends."""
    return (*limits[:-1], 1 if limits[-1] == 0 else limits[-1])


def merge_with_recomputations(orders: list[list[Action]], placement: Placement, limits: Limits) -> list[list[Action]]:
    """The order of each process, from that of each stage. The limits hold for each replica of a stage by itself."""
    replicas = [replica for order in orders for replica in by_worker(order, placement)]
    return merge([with_recomputations(replica, limits) for replica in replicas], placement)


def rows_with_recomputations(orders: list[list[Action]], placement: Placement, limits: Limits) -> list[list[Action]]:
    """The orders of processes with recomputations; a process with several devices starts its actions in the order in
    which they can run."""
    if not placement.has_several_devices:
        return [with_recomputations(order, limits) for order in orders]
    every = range(placement.num_stages)
    of_stages = [[action for order in orders for action in order if action.stage == stage] for stage in every]
    return merge_with_recomputations(of_stages, placement, limits)


def with_recomputations(order: Sequence[Action], limits: Limits) -> list[Action]:
    """The order of a stage, or of a process with several stages, with the R that the stages' limits need.

    Args:
        order: forwards and backwards, whole (B) or split (I and W).
        limits: one for each stage of the pipeline; it holds for each stage by itself.
    """
    recomputed: dict[int, frozenset[int | None]] = {}
    for stage in {action.stage for action in order}:
        recomputed[stage] = _recomputed([action for action in order if action.stage == stage], limits[stage])
    result: list[Action] = []
    for action in order:
        if action.kind.takes_gradient and action.micro_batch in recomputed[action.stage]:
            result.append(Action(RECOMPUTE, action.stage, action.micro_batch))
        result.append(action)
    return result


def _recomputed(order: Sequence[Action], limit: int | None) -> frozenset[int | None]:
    """The micro-batches of one stage whose forward does not keep its graph."""
    backward_at = {action.micro_batch: at for at, action in enumerate(order) if action.kind.takes_gradient}
    if limit is None:
        return frozenset()
    if limit == 0:
        return frozenset(backward_at)
    kept: set[int | None] = set()
    dropped: set[int | None] = set()
    for action in order:
        if action.kind == FORWARD:
            if action.micro_batch not in backward_at:
                continue
            kept.add(action.micro_batch)
            places = limit
        elif not action.kind.takes_gradient:
            continue
        else:
            kept.discard(action.micro_batch)
            places = limit - 1  # The backward's own graph takes one.
        if len(kept) > places:
            # One action adds at most one graph or takes one place, so dropping one is enough.
            last = max(kept, key=lambda micro_batch: backward_at[micro_batch])
            kept.remove(last)
            dropped.add(last)
    return frozenset(dropped)
