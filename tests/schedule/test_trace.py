from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Costs, Placement, Span, Timeline, build, simulate, write_trace


def events(path: Path, **wanted: Any) -> list[dict[str, Any]]:
    """The events of a trace file with these fields."""
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if all(event.get(key) == value for key, value in wanted.items())]


def test_every_action_is_an_event_of_its_stage(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = simulate(
        build("interleaved_1f1b", 4, 2, Placement.interleaved(4, 2)), Costs(0.25, 0.5, update_seconds=1)
    )
    write_trace(path, timeline)
    found = {event["name"]: event for event in events(path, ph="X")}
    assert set(found) == {str(span.action) for span in timeline.spans}
    for span in timeline.spans:
        event = found[str(span.action)]
        assert (event["tid"], event["args"]["process"]) == (span.action.stage, span.process)
        assert (event["ts"], event["dur"]) == (float(span.start) * 1e6, float(span.end - span.start) * 1e6)
    assert {event["cat"] for event in found.values()} == {"forward", "recompute", "backward", "update"}
    names = [event["args"]["name"] for event in events(path, name="thread_name")]
    assert names == [f"stage {stage} (process {stage % 2})" for stage in range(4)]


def test_waiting_and_sending_are_events_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [
        Span(0, Action.parse("0F0"), 5.0, 6.0, sending=0.25),
        Span(1, Action.parse("1F0"), 5.0, 8.0, waiting=2.0),
    ]
    write_trace(path, Timeline.from_spans(build("forward_only", 2, 1), spans))
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events(path, ph="X")] == [
        ("0F0", "forward", 0, 0.0, 750_000.0),
        ("send", "send", 0, 750_000.0, 250_000.0),
        ("wait", "wait", 1, 0.0, 2_000_000.0),
        ("1F0", "forward", 1, 2_000_000.0, 1_000_000.0),
    ]
    assert events(path, ph="C") == []


def test_counters_of_live_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = simulate(build("1f1b", 3, 6), Costs(1, 2))
    write_trace(path, timeline)
    for stage in range(3):
        counts = [e["args"]["micro-batches"] for e in events(path, ph="C", name=f"live micro-batches of stage {stage}")]
        assert (max(counts), counts[-1]) == (3 - stage, 0)


def test_several_timelines_are_processes_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    one, other = (simulate(build(name, 2, 2), Costs(1, 2, update_seconds=1)) for name in ("gpipe", "1f1b"))
    write_trace(str(path), one, other, titles=("measured", "predicted"))
    names = {event["pid"]: event["args"]["name"] for event in events(path, name="process_name")}
    assert names == {0: "measured", 1: "predicted"}
    assert [len(events(path, ph="X", pid=pid)) for pid in (0, 1)] == [len(one.spans), len(other.spans)]
    write_trace(path, one)
    assert events(path, name="process_name")[0]["args"]["name"] == "gpipe, K = 2, M = 2"


def test_a_trace_without_a_timeline_or_a_title(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="0 timelines with 0 titles"):
        write_trace(tmp_path / "a.json")
    with pytest.raises(ScheduleError, match="1 timelines with 2 titles; give each one"):
        write_trace(tmp_path / "a.json", simulate(build("gpipe", 1, 1), Costs(1, 2)), titles=("a", "b"))
    assert not (tmp_path / "a.json").exists()
