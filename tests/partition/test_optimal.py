"""The partitioner against every possible split of small models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition import StageCost, by_cost, stages_of


def prefix(costs: list[float]) -> list[float]:
    return [0, *accumulate(costs)]


def additive(*costs_by_stage: list[float]) -> StageCost:
    """A cost that is a sum over layers, with the layers' costs of each stage; the last list holds for later stages."""
    sums = [prefix(costs) for costs in costs_by_stage]

    def cost(stage: int, start: int, stop: int) -> float:
        own = sums[min(stage, len(sums) - 1)]
        return own[stop] - own[start]

    return cost


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(stop - start for start, stop in pairwise((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]


def rank(counts: tuple[int, ...], cost: StageCost) -> tuple[float, float, tuple[int, ...]]:
    """What the best split has the least of."""
    costs = [cost(*stage) for stage in stages_of(counts)]
    return max(costs), sum(one**2 for one in costs), tuple(-count for count in counts)


def best(
    num_layers: int, num_stages: int, cost: StageCost, fits: Callable[[int, int, int], bool] = lambda *_: True
) -> tuple[int, ...] | None:
    allowed = [c for c in all_splits(num_layers, num_stages) if all(fits(*stage) for stage in stages_of(c))]
    return min(allowed, key=lambda counts: rank(counts, cost), default=None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, StageCost]:
    """(L, K, cost): a cost that differs between the first stages, where zeros and ties are common."""
    num_layers = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_layers))
    layers = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    return num_layers, num_stages, additive(*(draw(layers) for _ in range(draw(st.integers(1, 3)))))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_no_other_split_is_better(problem: tuple[int, int, StageCost]) -> None:
    num_layers, num_stages, cost = problem
    counts = by_cost(num_layers, num_stages, cost)
    assert len(counts) == num_stages
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    assert counts == best(num_layers, num_stages, cost)


def test_equal_sums_of_squares_are_a_tie() -> None:
    """7, 7, 1, 4 and 4 are as even as 7, 7, 5, 2 and 2: their squares add up to 131 and 131."""
    cost = additive([7, 7, 1, 4, 2, 2])
    assert by_cost(6, 5, cost) == (1, 1, 2, 1, 1) == best(6, 5, cost)


@settings(deadline=None, max_examples=100)
@given(problems(), st.data())
def test_no_other_split_under_a_cap_is_better(problem: tuple[int, int, StageCost], data: st.DataObject) -> None:
    """Memory has what is not a sum over layers: boundaries at both ends, and the largest layer's working memory.

    A last stage that ends too early would hold more, which no split has: a plan of paper-1.3b-deep failed by it.
    """
    num_layers, num_stages, cost = problem
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=num_layers, max_size=num_layers))
    boundaries = data.draw(st.lists(st.integers(0, 4), min_size=num_layers + 1, max_size=num_layers + 1))
    cap = data.draw(st.integers(1, 60))

    def memory(stage: int, start: int, stop: int) -> float:
        own = sizes[start:stop]
        unfinished = 50 * (stage == num_stages - 1 and stop < num_layers)
        return sum(own) + max(own) + (num_stages - stage) * boundaries[start] + boundaries[stop] + unfinished

    expected = best(num_layers, num_stages, cost, lambda *stage: memory(*stage) <= cap)
    dip = 4 * (num_stages + 1)
    if expected is not None:
        assert by_cost(num_layers, num_stages, cost, memory, cap, memory_dip_bytes=dip) == expected
        return
    leanest = best(num_layers, num_stages, memory)
    assert leanest is not None
    least = max(memory(*stage) for stage in stages_of(leanest))
    gib = 2**30
    with pytest.raises(PartitionError, match=f"fits {cap:.4g} GiB .* needs {least:.4g} GiB"):
        by_cost(
            num_layers,
            num_stages,
            cost,
            lambda *stage: gib * memory(*stage),
            gib * cap,
            memory_dip_bytes=gib * dip,
        )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.data())
def test_costs_that_are_no_whole_numbers(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cost = additive(costs)
    counts = by_cost(len(costs), num_stages, cost)
    assert counts == by_cost(len(costs), num_stages, cost)
    expected = best(len(costs), num_stages, cost)
    assert expected is not None
    assert rank(counts, cost)[0] == pytest.approx(rank(expected, cost)[0], rel=1e-8)


def test_among_equal_splits_the_first_stages_are_longer_whatever_the_rounding() -> None:
    """Prefix sums of 0.1 differ in their last bits from place to place, which must not choose the split."""
    for num_layers, num_stages in ((7, 3), (10, 4), (23, 6)):
        counts = by_cost(num_layers, num_stages, additive([0.1] * num_layers))
        base, extra = divmod(num_layers, num_stages)
        assert counts == tuple(base + (stage < extra) for stage in range(num_stages))


def test_a_dear_head_gets_fewer_blocks_beside_it() -> None:
    assert by_cost(10, 2, additive([1.0] * 9 + [4.0])) == (7, 3)


def test_the_rest_is_even_where_one_layer_dominates() -> None:
    assert by_cost(10, 4, additive([1.0] * 9 + [100.0])) == (3, 3, 3, 1)


def test_a_stage_that_recomputes_nothing_takes_more_layers() -> None:
    assert by_cost(14, 2, additive([4.0] * 14, [3.0] * 14)) == (6, 8)


def test_a_deep_model_on_many_stages() -> None:
    """1700 layers on 128 stages under a cap that binds; a table of all stages' costs would have 185 million entries."""
    seconds = additive([4.0] * 1699 + [9.0])
    weights = additive([5.0] + [3.0] * 1698 + [9.0])

    def memory(stage: int, start: int, stop: int) -> float:
        return weights(stage, start, stop) + (128 - stage) * 0.1 * (start > 0)

    free = by_cost(1700, 128, seconds)
    fullest = max(memory(*stage) for stage in stages_of(free))
    counts = by_cost(1700, 128, seconds, memory, fullest - 1, memory_dip_bytes=12.8)
    assert sum(counts) == 1700
    assert max(memory(*stage) for stage in stages_of(counts)) <= fullest - 1


def test_all_layers_together_may_cost_less_than_a_part() -> None:
    """As memory does: every stage but the first keeps what it receives. It was an assertion that failed."""
    assert by_cost(2, 2, lambda stage, start, stop: stop - start + (10 if start else 0)) == (1, 1)


def test_the_last_layer_may_seem_to_cost_less_than_nothing() -> None:
    """A head whose weights are the embedding's adds nothing, and sums round."""
    costs = {(0, 1): 1.0, (0, 2): 2.0000000000000004, (0, 3): 2.0}
    assert by_cost(3, 1, lambda _, start, stop: costs.get((start, stop), 0.0)) == (3,)
