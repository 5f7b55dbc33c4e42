from __future__ import annotations

import json
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.schedule import Action, Costs, Placement, Schedule, Span, Timeline, breakdown, build, simulate
from hf_gpipe.schedule.kinds import RECOMPUTE
from tests.schedule.cases import Recompute, idle_seconds, schedules


@given(schedules(), st.fractions(0, 2, max_denominator=8))
@settings(deadline=None, max_examples=50)
def test_the_parts_of_every_row_are_exactly_the_step(case: tuple[Schedule, Recompute], transfer: Fraction) -> None:
    schedule, _ = case
    costs = Costs(Fraction(1), Fraction(2), Fraction(3, 2), Fraction(1, 3), transfer)
    timeline = simulate(schedule, costs)
    result = breakdown(timeline)
    for parts in (*result.processes, *result.stages, result.mean):
        assert parts.total == result.total_seconds == timeline.total_seconds
    for process, parts in enumerate(result.processes):
        assert (parts.wait, parts.other) == (idle_seconds(timeline, process), 0)
    assert result.mean.wait == timeline.bubble * timeline.total_seconds
    for stage, parts in enumerate(result.stages):
        assert parts.forward == schedule.num_micro_batches
        assert parts.recompute == schedule.num_actions(stage, RECOMPUTE) * Fraction(3, 2)
        assert parts.backward == (schedule.num_micro_batches * 2 if schedule.is_training else 0)
        assert parts.update == (Fraction(1, 3) if schedule.is_training else 0)


def measured() -> Timeline:
    """Two processes, one micro-batch: process 1 comes to its forward at 1 and waits until 3."""
    spans = [
        Span(0, Action.parse("0F0"), 0.0, 3.0, sending=0.5),
        Span(0, Action.parse("0B0"), 3.25, 9.0, waiting=2.0),
        Span(0, Action.parse("0U"), 9.0, 10.0),
        Span(1, Action.parse("1F0"), 1.0, 4.0, waiting=2.0),
        Span(1, Action.parse("1B0"), 4.5, 6.0, sending=0.25),
        Span(1, Action.parse("1U"), 6.0, 8.0, waiting=1.0),
    ]
    return Timeline.from_spans(build("gpipe", 2, 1, recompute="none"), spans)


def test_a_measured_step_has_sending_waiting_and_gaps() -> None:
    first, second = breakdown(measured()).processes
    assert (first.forward, first.send, first.backward, first.wait) == (2.5, 0.5, 3.75, 2.25)
    assert (first.update, first.other, first.total) == (1.0, 0.0, 10.0)
    # It waits 2 for its message, 1 in its update, 1 before it comes to its first action and 2 after its last one.
    assert (second.forward, second.backward, second.send, second.update) == (1.0, 1.25, 0.25, 1.0)
    assert (second.wait, second.other, second.total) == (6.0, 0.5, 10.0)


def test_the_table_as_text_and_as_data() -> None:
    timeline = simulate(build("gpipe", 2, 1, Placement.spread(2, 1)), Costs(0.001, 0.002))
    lines = breakdown(timeline).text().splitlines()
    assert lines[0].split() == ["forward", "recompute", "backward", "send", "wait", "update", "other"]
    assert [line[: line.index("ms")].split()[:-1] for line in lines[1:]] == [
        ["process", "0"],
        ["stage", "0"],
        ["stage", "1"],
    ]
    assert lines[1].split()[2:11] == ["2.0", "ms", "25%", "2.0", "ms", "25%", "4.0", "ms", "50%"]
    several = breakdown(measured())
    assert [line.split()[0] for line in several.text().splitlines()[1:]] == ["process", "process", "mean"]
    data = json.loads(json.dumps(several.to_dict()))
    assert data["total_seconds"] == 10.0
    assert data["processes"][1] == {
        "stages": [1],
        "forward_seconds": 1.0,
        "recompute_seconds": 0.0,
        "backward_seconds": 1.25,
        "send_seconds": 0.25,
        "wait_seconds": 6.0,
        "update_seconds": 1.0,
        "other_seconds": 0.5,
    }
    assert sum(data["mean"].values()) == 10.0


def test_an_empty_timeline_takes_no_time() -> None:
    empty = breakdown(Timeline(build("gpipe", 2, 2), ()))
    assert empty.total_seconds == empty.processes[0].total == 0
    assert "0.0 ms   0%" in empty.text()


def test_a_process_with_several_devices_has_their_mean() -> None:
    devices = Placement((0, 0, 0), ("cuda:0", "cuda:1", "cuda:2"))
    timeline = simulate(build("1f1b", 3, 4, devices), Costs(Fraction(1), Fraction(2)))
    alone = simulate(build("1f1b", 3, 4), Costs(Fraction(1), Fraction(2)))
    assert breakdown(timeline).processes == (breakdown(alone).mean,)
    assert breakdown(timeline).mean.wait == timeline.bubble * timeline.total_seconds
