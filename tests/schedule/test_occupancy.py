"""The tensors that stages hold over time: inputs, graphs and waiting gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.schedule import Action, Costs, Placement, Span, Timeline, build, simulate
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_held, occupancy
from tests.schedule.cases import peak

INPUTS_GRAPHS_AND_GRADIENTS = {
    Held.INPUT: {"bytes": 10},
    Held.GRAPH: {"bytes": 100},
    Held.GRADIENT: {"bytes": 10},
}


def levels(timeline: Timeline, stage: int) -> list[tuple[float, float]]:
    (process,) = timeline.schedule.placement.workers[stage]
    steps = occupancy(timeline, {stage: INPUTS_GRAPHS_AND_GRADIENTS}, process)
    return [(float(time), level["bytes"]) for time, level in steps]


@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_micro_batches_and_graphs_that_are_alive(num_stages: int, num_micro_batches: int) -> None:
    recomputed, plain, naive, evaluation = (
        build("gpipe", num_stages, num_micro_batches, recompute="stage"),
        build("gpipe", num_stages, num_micro_batches, recompute="none"),
        build("naive", num_stages, num_micro_batches, recompute="none"),
        build("forward_only", num_stages, num_micro_batches),
    )
    for stage in range(num_stages):
        of_gpipe = [peak(table, stage, Held.MICRO_BATCH) for table in (recomputed, plain)]
        assert of_gpipe == [num_micro_batches, num_micro_batches]
        assert [peak(table, stage, Held.MICRO_BATCH) for table in (naive, evaluation)] == [1, 1]
        graphs = [peak(table, stage, Held.GRAPH) for table in (recomputed, plain, naive, evaluation)]
        assert graphs == [1, num_micro_batches, 1, 0]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (3, 4), (4, 8)])
def test_recomputation_keeps_the_inputs_and_one_graph(num_stages: int, num_micro_batches: int) -> None:
    timeline = simulate(build("gpipe", num_stages, num_micro_batches, recompute="stage"), Costs(1, 2))
    for stage in range(num_stages):
        most = most_held(timeline, stage)
        assert most[Held.GRAPH] == 1
        # The first stage reads the batch.
        assert most[Held.INPUT] == (num_micro_batches if stage else 0)


def test_what_is_held_over_time() -> None:
    timeline = simulate(build("gpipe", 2, 2, recompute="stage"), Costs(1, 2))
    # Stage 1: inputs come at 1 and 2; graphs are made until 4 and 7 and gone at 6 and 9, with their inputs.
    assert levels(timeline, 1) == [(1, 10), (2, 20), (4, 120), (6, 10), (7, 110), (9, 0)]
    # Stage 0 makes its graphs before their gradients come, at 6 and 9, and uses these at once.
    assert levels(timeline, 0) == [(3, 100), (8, 0), (9, 100), (11, 0)]


def test_gradients_that_come_early_wait() -> None:
    table = build("gpipe_fused", 2, 4, recompute="none")
    assert most_held(simulate(table, Costs([3, 1], 1)), 0)[Held.GRADIENT] == 3
    # The last stage sends a gradient at 3, 5, 7 and 9; stage 0 begins to use them at 4, 5, 7 and 9.
    waiting = [(3, 1), (4, 0)]
    steps = occupancy(simulate(table, Costs(1, 1)), {0: {Held.GRADIENT: {"waiting": 1}}}, 0)
    assert [(time, level["waiting"]) for time, level in steps] == waiting


def test_several_stages_and_items_add_up() -> None:
    timeline = simulate(build("gpipe", 2, 1, Placement((0, 0)), recompute="none"), Costs(1, 2))
    amounts = {0: {Held.GRAPH: {"activations": 3}}, 1: {Held.GRAPH: {"activations": 5, "logits": 7}}}
    assert list(occupancy(timeline, amounts, 0)) == [
        (1, {"activations": 3}),
        (2, {"activations": 8, "logits": 7}),
        (4, {"activations": 3, "logits": 0}),
        (6, {"activations": 0, "logits": 0}),
    ]


def test_the_gradients_of_weights_stay_from_the_first_backward_on() -> None:
    timeline = simulate(build("1f1b", 1, 2, recompute="none"), Costs(1, 2))
    steps = occupancy(timeline, {0: {Held.FIRST_BACKWARD: {"first": 1}, Held.WEIGHT_GRADIENTS: {"gradients": 4}}}, 0)
    assert list(steps)[:2] == [(1, {"first": 1}), (3, {"first": 0, "gradients": 4})]


def test_a_measured_action_works_after_its_wait() -> None:
    schedule = build("gpipe", 1, 2, recompute="none")
    actions = [Action.parse(text) for text in ("0F0", "0F1", "0B1", "0B0")]
    measured = [Span(0, action, 10.0 * i, 10.0 * i + 10, waiting=4.0) for i, action in enumerate(actions)]
    timeline = Timeline.from_spans(schedule, measured)
    steps = occupancy(timeline, {0: {Held.MICRO_BATCH: {"micro-batches": 1}}}, 0)
    expected = [(4.0, 1), (14.0, 2), (30.0, 1), (40.0, 0)]
    assert [(time, level["micro-batches"]) for time, level in steps] == expected
    assert levels(timeline, 0) == [(10.0, 100), (20.0, 200), (30.0, 100), (40.0, 0)]
