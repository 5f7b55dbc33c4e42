"""A kind of action that one file adds: a table with it is checked, simulated, drawn and executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_gpipe import Pipeline
from hf_gpipe.errors import ScheduleError, StageError
from hf_gpipe.runtime import performing
from hf_gpipe.schedule import ActionKind, Costs, Placement, Schedule, build, check_table, draw_text, kinds, simulate
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

SEEN: list[str] = []


def note(step: performing.Step, planned: performing.Planned, received: performing.Tensors) -> performing.Tensors:
    SEEN.append(f"{planned.action} of {step.shares[planned.device][planned.index].num_rows}")
    assert SEEN[-1] != "0C1 of 1", "only one row"
    return {}


@pytest.fixture(autouse=True)
def copy() -> Iterator[ActionKind]:
    """A copy to the device that a forward waits for, beside the actions before it."""
    kind = ActionKind("C", "copy", resource=kinds.Resource.COPY_IN, needed_by=(kinds.FORWARD,), in_training_only=False)
    yield performing.add_kind(kind, note)
    del kinds.KINDS[kind], performing.PERFORMED[kind]
    kinds.needs_of.cache_clear()
    kinds.awaited_by.cache_clear()


def text_of(placement: Placement) -> str:
    text = build("gpipe", 2, 3, placement, (None, None)).text()
    return text.replace("0F1", "0C1 0F1").replace("1F2", "1C2 1F2")


def test_a_table_with_another_kind_is_checked_simulated_and_drawn() -> None:
    text = text_of(Placement.one_stage_each(2))
    with pytest.raises(ScheduleError, match="0F1 comes before 0C1, which it needs"):
        check_table(Schedule.from_text(text.replace("0C1 0F1", "0F1 0C1")))
    check_table(table := Schedule.from_text(text))
    timeline = simulate(table, Costs(1, 2, others={"C": 3}))
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert [spans[word] for word in ("0F0", "0C1", "0F1")] == [(0, 1), (0, 3), (3, 4)]
    assert timeline.busy_seconds(0) == 3 * (1 + 2), "a copy is no work of the device"
    assert "F0 C1 -- F1" in draw_text(timeline)


def test_a_table_with_another_kind_is_executed(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(text_of(Placement([0, 0])))
    model, batch = plain_model(tiny_config("marian")), padded_batch(tiny_config("marian"))
    pipe = Pipeline(model, 2, 3, str(tmp_path / "mine.txt"), attn_implementation="eager")
    assert_same(run_pipeline(pipe, batch), run_plain(model, batch, 3))
    assert SEEN == ["0C1 of 2", "1C2 of 2"]
    with pytest.raises(StageError, match=r"(?s)only one row.*>0C1<"):
        pipe.train_step({name: rows[:3] for name, rows in batch.items()})
