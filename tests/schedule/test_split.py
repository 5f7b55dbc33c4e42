"""Tables whose backward is split into I (gradient of the inputs) and W (gradients of the weights)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule import Action, Costs, Schedule, breakdown, check_table, draw_text, simulate
from hf_gpipe.schedule.kinds import INPUT, WEIGHT, Held
from hf_gpipe.schedule.messages import messages
from hf_gpipe.schedule.occupancy import most_of_equal_stages

TEXT = """\
table: 10
schedule: mine
num_stages: 2
num_micro_batches: 2
placement: 0 1
process 0: 0F0 0F1 0I0 0W0 0R1 0B1 0U
process 1: 1F0 1I0 1F1 1I1 1W0 1W1 1U
"""
TABLE = Schedule.from_text(TEXT)


def test_each_stage_and_micro_batch_has_either_b_or_i_and_w() -> None:
    check_table(TABLE)
    assert TABLE.is_training
    assert TABLE.text() == TEXT
    assert TABLE.split == {(0, 0), (1, 0), (1, 1)}
    assert [m.source for m in messages(TABLE) if m.receiver == 0] == [Action.parse("1I0"), Action.parse("1I1")]
    assert TABLE.consumers(Action.parse("1I1")) == (Action.parse("0B1"),)
    assert TABLE.consumers(Action.parse("1I0")) == (Action.parse("0I0"),)
    assert TABLE.keeps_graph(0, 0)
    assert not TABLE.keeps_graph(0, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" 1W0", "", "1W0 is missing from process 1; a backward is one B, or one I and one W"),
        ("1I0 ", "", "1I0 is missing from process 1; a backward is one B, or one I and one W"),
        ("0I0 0W0", "0I0 0W0 0B0", "0B0 and 0I0 are both on process 0; keep B, or I and W"),
        ("0I0 0W0", "0W0 0I0", "0W0 comes before 0I0, which it needs"),
        ("0F0 0F1 0I0", "0F1 0I0 0F0", "0I0 comes before 0F0, which it needs"),
        ("1W1 1U", "1U 1W1", "1W1 comes after 1U|1U comes before 1W1"),
        ("1I0 1F1 1I1", "1F1 1I1 1I0", "0B1 takes the message of 1I0|0I0 takes the message of 1I1"),
    ],
)
def test_a_table_that_cannot_be_run(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        check_table(Schedule.from_text(TEXT.replace(old, new)))


def test_w_of_every_micro_batch_comes_before_the_reduction() -> None:
    text = (
        "table: 10\nschedule: mine\nnum_stages: 1\nnum_micro_batches: 2\nplacement: 0,1\n"
        "process 0: 0F0 0I0 0W0 0G 0U\nprocess 1: 0F1 0I1 0W1 0G 0U\n"
    )
    check_table(Schedule.from_text(text))
    with pytest.raises(ScheduleError, match="0G comes before 0W1"):
        check_table(Schedule.from_text(text.replace("0W1 0G", "0G 0W1")))


def test_the_time_of_i_and_w() -> None:
    costs = Costs(Fraction(1), Fraction(4), input_seconds=Fraction(2), weight_seconds=Fraction(3))
    spans = {str(span.action): (span.start, span.end) for span in simulate(TABLE, costs).spans}
    assert spans["1I0"] == (2, 4)
    assert spans["0I0"] == (4, 6)
    assert spans["0W0"] == (6, 9)
    assert spans["1W1"][1] == 13
    assert spans["0B1"] == (10, 14)
    halves = simulate(TABLE, Costs(Fraction(1), Fraction(4)))
    busy = {span.action.kind: span.busy for span in halves.spans_of[1][1]}
    assert busy[WEIGHT] == busy[INPUT] == 2
    assert breakdown(halves).processes[1].backward == 8
    assert "I0 W0" in draw_text(simulate(TABLE, Costs(1, 2)))


def test_what_a_stage_holds() -> None:
    """The graph until I, what W needs until W."""
    most = most_of_equal_stages(TABLE)
    assert most[1][Held.GRAPH] == 1
    assert most[1][Held.DEFERRED] == 2
    assert most[1][Held.MICRO_BATCH] == 2
    assert most[0][Held.DEFERRED] == most[0][Held.WEIGHT] == most[0][Held.FIRST_BACKWARD] == 1
    assert [a.kind for a in TABLE.actions[0]].count(WEIGHT) == 1
