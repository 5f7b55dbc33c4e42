from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Costs, Placement, Schedule, Span, Timeline, build, simulate

K_AND_M = (st.integers(1, 8), st.integers(1, 12))
SECONDS = st.fractions(Fraction(1, 10), 10, max_denominator=10)


def spans_by_text(timeline: Timeline) -> dict[str, Span]:
    return {str(span.action): span for span in timeline.spans}


@given(*K_AND_M, SECONDS, SECONDS)
@settings(deadline=None, max_examples=60)
def test_the_bubble_of_gpipe_is_exactly_the_papers(K: int, M: int, forward: Fraction, backward: Fraction) -> None:
    timeline = simulate(build("gpipe", K, M, recompute="none"), Costs(forward, backward))
    assert timeline.total_seconds == (M + K - 1) * (forward + backward)
    assert timeline.bubble == Fraction(K - 1, M + K - 1)
    for stage in range(K):
        assert timeline.busy_seconds(stage) == M * (forward + backward)


@given(*K_AND_M, SECONDS, SECONDS, SECONDS)
@settings(deadline=None, max_examples=60)
def test_recomputation_hides_in_the_fill_and_the_drain(
    K: int, M: int, forward: Fraction, recompute: Fraction, backward: Fraction
) -> None:
    timeline = simulate(build("gpipe", K, M, recompute="stage"), Costs(forward, backward, recompute))
    both = forward + backward
    # The time grows by one stage's own recomputations; the idle time in seconds is the same as without.
    assert timeline.total_seconds == (M + K - 1) * both + M * recompute
    assert timeline.bubble == (K - 1) * both / ((M + K - 1) * both + M * recompute)
    # Every stage before the last has its first recomputation behind it when the first gradient comes.
    spans = spans_by_text(timeline)
    for stage in range(K - 1):
        assert spans[f"{stage}R{M - 1}"].end <= spans[f"{stage + 1}B{M - 1}"].end


@given(*K_AND_M, SECONDS, SECONDS)
@settings(deadline=None, max_examples=40)
def test_the_other_schedules_times(K: int, M: int, forward: Fraction, backward: Fraction) -> None:
    costs = Costs(forward, backward)
    naive = simulate(build("naive", K, M, recompute="none"), costs)
    assert naive.total_seconds == K * M * (forward + backward)
    assert naive.bubble == 1 - Fraction(1, K)
    evaluation = simulate(build("forward_only", K, M), costs)
    assert evaluation.total_seconds == (M + K - 1) * forward
    assert evaluation.bubble == Fraction(K - 1, M + K - 1)
    fused = simulate(build("gpipe_fused", K, M, recompute="none"), costs)
    assert fused.bubble == Fraction(K - 1, M + K - 1)
    with_recompute = [simulate(build(name, K, M), costs).total_seconds for name in ("gpipe_fused", "gpipe")]
    assert with_recompute[0] <= with_recompute[1]


@given(*K_AND_M, st.data())
@settings(deadline=None, max_examples=40)
def test_no_time_is_lost_or_used_twice(K: int, M: int, data: st.DataObject) -> None:
    placement = Placement.spread(K, data.draw(st.integers(1, K)))
    per_stage = st.lists(SECONDS, min_size=K, max_size=K)
    costs = Costs(data.draw(per_stage), data.draw(per_stage), update_seconds=data.draw(per_stage))
    schedule = build(data.draw(st.sampled_from(["naive", "gpipe", "gpipe_fused"])), K, M, placement)
    timeline = simulate(schedule, costs)
    spans = spans_by_text(timeline)
    for span in timeline.spans:
        source = span.action.source(K)
        assert source is None or spans[str(source)].end <= span.start
    for process in range(placement.num_processes):
        own = [span for span in timeline.spans if span.process == process]
        assert [span.action for span in own] == list(schedule.actions[process])
        assert all(one.end <= following.start for one, following in pairwise(own))
    if placement.num_processes == 1:
        assert timeline.bubble == 0
    busy = sum(timeline.busy_seconds(stage) for stage in range(K))
    assert timeline.bubble == 1 - Fraction(busy) / (placement.num_processes * timeline.total_seconds)


def test_transfers_take_time_between_processes_and_between_devices_only() -> None:
    costs = Costs(1, 2, transfer_seconds=[10])
    assert simulate(build("gpipe", 2, 1, recompute="none"), costs).total_seconds == 26
    assert simulate(build("gpipe", 2, 1, Placement((0, 0)), "none"), costs).total_seconds == 6
    two_devices = Placement((0, 0), ("cuda:0", "cuda:1"))
    assert simulate(build("gpipe", 2, 1, two_devices, "none"), costs).total_seconds == 26
    one_device = Placement((0, 0), ("cuda:0", "cuda:0"))
    assert simulate(build("gpipe", 2, 1, one_device, "none"), costs).total_seconds == 6


def test_each_boundary_has_its_own_transfer_time() -> None:
    costs = Costs(1, 2, transfer_seconds=[10, 100])
    timeline = simulate(build("gpipe", 3, 1, recompute="none"), costs)
    starts = {text: span.start for text, span in spans_by_text(timeline).items() if "U" not in text}
    assert starts == {"0F0": 0, "1F0": 11, "2F0": 112, "2B0": 113, "1B0": 215, "0B0": 227}


def test_a_message_waits_for_the_one_before_it() -> None:
    spans = spans_by_text(simulate(build("forward_only", 2, 3), Costs(1, 2, transfer_seconds=5)))
    assert [spans[f"0F{m}"].end for m in range(3)] == [1, 2, 3]
    assert [spans[f"1F{m}"].start for m in range(3)] == [6, 11, 16]


def test_each_stage_has_its_own_costs() -> None:
    costs = Costs([1, 2], [3, 4], [5, 6], [7, 8], [0])
    spans = spans_by_text(simulate(build("gpipe", 2, 1), costs))
    assert {text: span.end - span.start for text, span in spans.items()} == {
        "0F0": 1, "0R0": 5, "0B0": 3, "0U": 7, "1F0": 2, "1R0": 6, "1B0": 4, "1U": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs([1, 1], 2), "forward_seconds has 2 values for 3 stages"),
        (Costs(1, 2, transfer_seconds=[1, 1, 1]), "transfer_seconds has 3 values for 2 boundaries"),
        (Costs(1, [1, -2, 1]), "backward_seconds is -2 somewhere"),
    ],
)
def test_costs_that_do_not_fit(costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(build("gpipe", 3, 2), costs)


def test_a_table_that_deadlocks_has_no_time() -> None:
    crossed = Schedule.from_text(
        "table: 10\nschedule: crossed\nnum_stages: 2\nnum_micro_batches: 1\nplacement: 0 0\nprocess 0: 1F0 0F0"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(crossed, Costs(1, 2))


def test_a_measured_timeline() -> None:
    schedule = build("forward_only", 2, 2)
    measured = [
        Span(1, Action.parse("1F1"), 106.0, 109.0, waiting=1.0),
        Span(0, Action.parse("0F0"), 100.0, 102.0),
        Span(1, Action.parse("1F0"), 100.0, 106.0, waiting=3.0),
        Span(0, Action.parse("0F1"), 102.0, 104.0),
    ]
    timeline = Timeline.from_spans(schedule, measured)
    assert [str(span.action) for span in timeline.spans] == ["0F0", "0F1", "1F0", "1F1"]
    assert (timeline.spans[0].start, timeline.total_seconds) == (0.0, 9.0)
    assert [timeline.busy_seconds(stage) for stage in range(2)] == [4.0, 5.0]
    assert timeline.bubble == 1 - 9 / 18


def test_a_simulated_timeline_measured_again_is_the_same() -> None:
    timeline = simulate(build("gpipe", 3, 4), Costs(1, 2))
    later = [span._replace(start=span.start + 50, end=span.end + 50) for span in reversed(timeline.spans)]
    assert Timeline.from_spans(timeline.schedule, later) == timeline
