"""Partition: cut a model's list of layers into consecutive stages. Pure Python, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import PartitionError, nearest
from hf_gpipe.partition.count import by_count
from hf_gpipe.partition.optimal import StageCost, by_cost, stages_of

__all__ = ["COST_STRATEGIES", "COUNT", "StageCost", "by_cost", "by_count", "partition", "stages_of"]

COUNT = "count"
"""The strategy that needs no costs: `by_count`."""

COST_STRATEGIES = ("parameters", "flops", "profile")
"""Strategies that need the model's costs; the planner turns them into lists with `by_cost`."""


def partition(
    num_layers: int, num_stages: int, strategy: str | Sequence[int] = COUNT, *, shares_last: bool = False
) -> tuple[range, ...]:
    """The layers of each stage, as consecutive ranges that hold every layer exactly once and in order.

    Args:
        num_layers: the length of the adapter's list: embeddings, blocks, norms and heads, not blocks alone.
        num_stages: K, between 1 and `num_layers`.
        strategy: `COUNT`, or the number of layers of each stage, for example [3, 4, 2].
        shares_last: whether every stage has a part of the last layer. It is counted to the last stage, which then has
            another layer as well.

    Raises:
        PartitionError: more stages than layers, an unknown strategy, or counts that do not fit; names both numbers.
    """
    if num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages}; use at least 1.")
    if num_stages > num_layers - (shares_last and isinstance(strategy, str)):
        raise PartitionError(
            f"num_stages is {num_stages}, but the model has {num_layers} layers and every stage needs at least one; "
            f"use num_stages of at most {num_layers}, or a deeper model."
        )
    if not isinstance(strategy, str):
        return _ranges(_checked(strategy, num_layers, num_stages))
    if strategy in COST_STRATEGIES:
        raise PartitionError(
            f"partition {strategy!r} needs the cost of each layer, which hf_gpipe.planner.decide finds out; give "
            "the strategy to Pipeline, or use count."
        )
    if strategy != COUNT:
        names = (COUNT, *COST_STRATEGIES)
        raise PartitionError(
            f"partition {strategy!r} is unknown; use one of {', '.join(names)}, or a list with the number of "
            f"layers of each stage{nearest(strategy, names)}"
        )
    counts = by_count(num_layers - shares_last, num_stages)
    return _ranges((*counts[:-1], counts[-1] + shares_last))


def _checked(counts: Sequence[int], num_layers: int, num_stages: int) -> Sequence[int]:
    counts = list(counts)
    if len(counts) != num_stages:
        raise PartitionError(
            f"partition {counts} has {len(counts)} entries and num_stages is {num_stages}; give one count per stage."
        )
    for stage, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise PartitionError(
                f"partition {counts} gives stage {stage} {count!r} layers; each stage needs a whole number above 0."
            )
    if sum(counts) != num_layers:
        raise PartitionError(
            f"partition {counts} adds up to {sum(counts)} layers, but the model has {num_layers}; "
            f"change the counts until they add up to {num_layers}."
        )
    return counts


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for _, start, stop in stages_of(counts))
