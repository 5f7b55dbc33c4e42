from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.schedule import Action, Placement, Schedule, build
from hf_gpipe.schedule.actions import gradient_action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, RECOMPUTE, UPDATE, WEIGHT

F, R, B, U = FORWARD, RECOMPUTE, BACKWARD, UPDATE
W = WEIGHT

GPIPE_2_2 = """\
table: 10
schedule: gpipe
num_stages: 2
num_micro_batches: 2
placement: 0 1
process 0: 0F0 0F1 0R1 0B1 0R0 0B0 0U
process 1: 1F0 1F1 1R1 1B1 1R0 1B0 1U
"""


def test_action_text() -> None:
    assert str(Action(F, 2, 0)) == "2F0"
    assert str(Action(U, 2)) == "2U"
    assert Action.parse("12B345") == Action(B, 12, 345)
    assert Action.parse("7U") == Action(U, 7)


@pytest.mark.parametrize("text", ["", "F0", "-1F0", "2F0 ", "2f0", "0F0F", "02F0", "2F00", "\u0662F0", "9" * 10 + "F0"])
def test_text_that_is_not_an_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(("text", "kind"), [("2X0", "X"), ("1K3", "K")])
def test_a_kind_that_this_version_does_not_have(text: str, kind: str) -> None:
    with pytest.raises(
        ScheduleError, match=f"'{text}': {kind} is not .* version 10 .* has F, R, B, I, W, G, U, O, P, D, L, H, A, S, T"
    ):
        Action.parse(text)


@pytest.mark.parametrize("text", ["2F", "2I", "2W"])
def test_only_a_reduction_and_an_update_stand_without_a_micro_batch(text: str) -> None:
    with pytest.raises(ScheduleError, match=rf"action {text}: .* in version 10 of the table's text"):
        Action.parse(text)


def test_only_an_update_has_no_micro_batch() -> None:
    with pytest.raises(ScheduleError, match="1F"):
        Action(F, 1)
    with pytest.raises(ScheduleError, match="1U3"):
        Action(U, 1, 3)


def test_messages_go_to_the_neighbour() -> None:
    assert Action(F, 0, 5).source(3) is None
    assert Action(F, 1, 5).source(3) == Action(F, 0, 5)
    assert Action(B, 2, 5).source(3) is None
    assert Action(B, 1, 5).source(3) == Action(B, 2, 5)
    assert Action(R, 1, 5).source(3) is None
    assert Action(W, 1, 5).source(3) is None
    split = {(2, 5)}
    assert Action(B, 1, 5).source(3, split) == gradient_action(2, 5, split) == Action(INPUT, 2, 5)
    assert gradient_action(1, 5, split) == Action(B, 1, 5)


def test_each_message_has_one_receiver_or_one_of_each_stage() -> None:
    table = build("1f1b", 3, 2)
    assert table.consumers(Action(F, 0, 1)) == (Action(F, 1, 1),)
    assert not any(table.consumers(action) for action in (Action(F, 2, 1), Action(B, 0, 1), Action(R, 1, 1)))
    divided = build("vocab_1f1b", 3, 2)
    assert divided.consumers(Action(F, 2, 1)) == tuple(Action(LOGITS, stage, 1) for stage in range(2))
    assert divided.consumers(Action(LOGITS, 2, 1)) == tuple(Action(LOGITS_GRADIENT, stage, 1) for stage in range(2))
    assert divided.consumers(Action(LOGITS_GRADIENT, 0, 1)) == (Action(B, 2, 1),)
    assert build("vocab_forward_only", 3, 2).consumers(Action(LOGITS, 2, 1)) == ()


def test_placements() -> None:
    assert Placement.spread(3, 1) == Placement((0, 0, 0))
    assert Placement.one_stage_each(3) == Placement((0, 1, 2))
    assert Placement.spread(7, 3) == Placement((0, 0, 0, 1, 1, 2, 2))
    looped = Placement((0, 1, 0, 1))
    assert (looped.num_stages, looped.num_processes) == (4, 2)
    assert looped.stages_of(0) == (0, 2)
    assert looped.stages_of(1) == (1, 3)
    assert [looped.worker_of(*where) for where in ((0, 0), (1, 2), (2, None))] == [0, 1, 0]
    assert [looped.place_of(looped.workers[stage][0], stage) for stage in range(3)] == [(0, None), (1, None), (0, None)]
    spread = Placement((0, 1, 0, 1), ("a", "a", "b", "b"))
    assert [spread.place_of(spread.workers[stage][0], stage) for stage in (0, 2)] == [(0, "a"), (0, "b")]


@given(st.integers(1, 30), st.data())
def test_spread_is_contiguous_and_even(num_stages: int, data: st.DataObject) -> None:
    num_processes = data.draw(st.integers(1, num_stages))
    placement = Placement.spread(num_stages, num_processes)
    assert list(placement.workers) == sorted(placement.workers)
    sizes = [len(placement.stages_of(process)) for process in range(num_processes)]
    assert sum(sizes) == num_stages
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(()), "no stage"),
        (lambda: Placement((0, 2)), "without a gap"),
        (lambda: Placement((1, 2)), "from 0"),
        (lambda: Placement((0, -1)), "from 0"),
        (lambda: Placement((0, 0), ("cpu",)), "1 devices for 2 stages"),
        (lambda: Placement((0,), ("cuda 0",)), "'cuda 0' is not a device"),
        (lambda: Placement.spread(2, 3), "2 stages cannot be spread over 3 processes"),
        (lambda: Placement.spread(2, 0), "0 processes"),
        (lambda: Placement.one_stage_each(0), "0 stages"),
    ],
)
def test_wrong_placements(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError, match=message):
        make()


def test_text_form() -> None:
    assert build("gpipe", 2, 2).text() == GPIPE_2_2
    assert str(build("gpipe", 2, 2)) == GPIPE_2_2
    assert Schedule.from_text(GPIPE_2_2) == build("gpipe", 2, 2)


def test_the_module_shows_the_real_text_form() -> None:
    import hf_gpipe.schedule.text_form as text_form

    assert text_form.__doc__ is not None
    shown = "".join(line[4:] + "\n" for line in text_form.__doc__.splitlines() if line.startswith("    "))
    assert shown == GPIPE_2_2


actions = st.one_of(
    st.builds(Action, st.sampled_from([F, R, B]), st.integers(0, 12), st.integers(0, 99)),
    st.builds(Action, st.just(U), st.integers(0, 12)),
)


@st.composite
def any_schedules(draw: st.DrawFn) -> Schedule:
    """Tables that need not be valid: the text form holds any."""
    processes = draw(st.integers(1, 4))
    places = draw(st.permutations([*range(processes), *draw(st.lists(st.integers(0, processes - 1), max_size=3))]))
    devices = st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:1"]), min_size=len(places), max_size=len(places))
    return Schedule(
        name=draw(st.text().filter(lambda name: name.strip().splitlines() == [name])),
        num_stages=draw(st.integers(0, 20)),
        num_micro_batches=draw(st.integers(0, 20)),
        placement=Placement(tuple(places), draw(st.none() | devices.map(tuple))),
        actions=tuple(tuple(draw(st.lists(actions, max_size=6))) for _ in range(draw(st.integers(0, 4)))),
    )


@given(any_schedules())
@settings(deadline=None, max_examples=80)
def test_text_round_trip_is_exact(schedule: Schedule) -> None:
    again = Schedule.from_text(schedule.text())
    assert again == schedule
    assert hash(again) == hash(schedule)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("table: 10\n", "", "^line 1: found 'schedule: gpipe', expected a line that starts with table:"),
        (
            "table: 10",
            "table: 11",
            "^line 1: .*version '11', and this version of hf_gpipe reads versions 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10",
        ),
        ("table: 10", "table:", "^line 1: .*version ''"),
        ("table: 10\n", "# mine\ntable: 1\n", "^line 1: found '# mine'"),
        ("schedule: gpipe\n", "", "^line 2: found 'num_stages: 2', expected .* schedule:"),
        ("schedule: gpipe", "schedule:", "^line 2: schedule name ''"),
        ("num_stages", "num_stage", "^line 3: .*did you mean 'num_stages'"),
        ("num_stages: 2", "num_stages: two", "^line 3: num_stages: found 'two', expected one number"),
        ("num_stages: 2", "num_stages: 2 2", "^line 3: num_stages: found '2 2', expected one number"),
        ("num_stages: 2", "num_stages: 02", "^line 3: num_stages: found '02'"),
        ("num_stages: 2", "num_stages: " + "2" * 5000, "^line 3: num_stages: found '22.*2...'"),
        (
            "placement: 0 1",
            "placement: 0,x 1",
            "^line 5: placement: found '0,x 1', .* one process .* 0,1 2 .*version 10",
        ),
        ("placement: 0 1", "placement: 0, 1", "^line 5: placement: found '0, 1'"),
        ("placement: 0 1", "placement: 0,0 1", "^line 5: placement: the replicas of stage 0 .*none twice"),
        ("placement: 0 1", "placement: 0 2", "^line 5: placement .* without a gap"),
        ("placement: 0 1", "placement: 0 1\nplacement: 0 1", "^line 6: .*expected .* devices: or process 0:"),
        ("placement: 0 1", "placement: 0 1\ndevices: cpu", "^line 5: placement: 1 devices for 2 stages"),
        ("process 0", "process 1", "^line 6: found 'process 1.*expected .*process 0"),
        ("process 1", "process 2", "^line 7: found 'process 2.*expected .*process 1"),
        ("process 1:", "process 1", "^line 7"),
        ("1R1", "1Q1", "^line 7: '1Q1': Q is not a kind of action"),
        ("1R1", "R1", "^line 7: 'R1' is not an action"),
        ("1U\n", "1U\ndevices: cpu cpu", "^line 8: found 'devices: cpu cpu', expected .* process 2:"),
        (GPIPE_2_2, "", "^the line 'table:' is missing"),
        (GPIPE_2_2[GPIPE_2_2.index("placement") :], "", "^the line 'placement:' is missing"),
    ],
)
def test_wrong_text_is_named_by_its_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(GPIPE_2_2.replace(old, new))


@pytest.mark.parametrize("name", ["", " gpipe", "gpipe\n", "a\nb"])
def test_a_name_survives_the_text_form_or_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="name"):
        Schedule(name, 1, 1, Placement((0,)), ((Action(F, 0, 0),),))


def test_which_forwards_keep_their_graph() -> None:
    recomputed, plain = build("gpipe", 2, 2, recompute="stage"), build("gpipe", 2, 2, recompute="none")
    fused, evaluation = build("gpipe_fused", 2, 2), build("forward_only", 2, 2)
    for stage in range(2):
        for micro_batch in range(2):
            assert not recomputed.keeps_graph(stage, micro_batch)
            assert plain.keeps_graph(stage, micro_batch)
            assert fused.keeps_graph(stage, micro_batch) == (stage == 1)
            assert not evaluation.keeps_graph(stage, micro_batch)


def test_training_tables_have_backwards() -> None:
    assert build("gpipe", 2, 2).is_training
    assert not build("forward_only", 2, 2).is_training
