from __future__ import annotations

import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import Action, Placement, Span
from hf_gpipe.schedule.kinds import FORWARD
from hf_gpipe.training import slow_machines
from hf_gpipe.training.slow_machines import SlowMachines, seconds_of_forward
from tests.gloo import run_gloo
from tests.training.toy import trainer

EVERY = 20


class Others:
    """Stands for the world of the first of some processes: the others take so many times as long as it."""

    is_main = True

    def __init__(self, hosts: list[str]) -> None:
        self.hosts, self.placement = hosts, Placement(range(len(hosts)))
        self.factors = [1.0] * len(hosts)

    def gather_objects(self, value: Any) -> list[Any]:
        return [None if value is None else value * factor for factor in self.factors]


def watch(others: Others, planned: list[float] | None = None) -> SlowMachines:
    """With a plan in which each process needs so many seconds for a forward, if given."""

    def plan() -> Any:
        if planned is None:
            raise UserError("no example")
        spans = [Span(p, Action.parse("0F0"), 5.0, 5.0 + seconds) for p, seconds in enumerate(planned)]
        return SimpleNamespace(timeline=SimpleNamespace(spans=spans))

    return SlowMachines(cast(Pipeline, SimpleNamespace(world=others, plan=plan)), EVERY)


def run(watched: SlowMachines, windows: int = 1) -> None:
    """Steps up to the next comparison; this process waits 7 s, computes for 2 and sends for 1 in each forward."""
    for step in range(windows * EVERY):
        times = watched.times(1)
        if times is not None:
            disturbed = 0.0 if step == 3 else 20.0  # most steps are disturbed
            times.append(ActionTime(Action.parse("0F0"), 100.0, 110.0 + disturbed, waiting=7.0, sending=1.0))
            times.append(ActionTime(Action.parse("0U"), 110.0, 150.0))
        watched.count(1, times)


def test_a_machine_that_becomes_slow_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    others = Others(["a", "b", "c"])
    watched = watch(others)
    others.factors = [1.0, 4.0, 2.0]  # the stages differ
    run(watched, 2)
    others.factors = [1.0, 4.0, 2.8]
    run(watched)
    assert caplog.text == ""
    others.factors = [1.0, 4.0, 6.0]
    run(watched, 2)
    (message,) = caplog.messages
    assert message.startswith(
        "machine c is slow: in the last 20 steps process 2 (stage 2) computed 3.0 times as long as in its first steps,"
    )


def test_at_first_a_machine_is_compared_with_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    others = Others(["a", "b", "b"])
    watched = watch(others, [1.0, 2.0, 2.0])
    others.factors = [1.0, 3.6, 3.8]  # the plan may be wrong by so much, and rows longer than those planned with
    run(watched)
    assert caplog.text == ""
    watched = watch(others, [1.0, 2.0, 2.0])
    others.factors = [5.0, 4.0, 4.0]
    run(watched, 2)
    (message,) = caplog.messages
    assert "process 0 (stage 0) computed 2.5 times as long as by the plan," in message


def test_processes_are_compared_with_those_of_other_machines_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Two processes of a slow machine are both named; a process that computes nothing counts nowhere."""
    others = Others(["a", "a", "b", "c"])
    others.gather_objects = lambda value: [3.0, 3.0, 1.0, None]  # type: ignore[method-assign]
    run(watch(others, [1.0, 1.0, 1.0, 1.0]))
    assert [message[:16] for message in caplog.messages] == ["machine a is slo"] * 2
    assert all("computed 3.0 times as long" in message for message in caplog.messages)
    caplog.clear()
    run(watch(Others(["a", "b"]), [1.0, 0.0]))  # the second has no ratio, so the first has no other
    assert caplog.messages == []


def test_seconds_of_a_forward_are_those_of_all_that_computes() -> None:
    seconds = {"0F0": 1.0, "0B0": 2.0, "0U": 9.0, "0F1": 2.0}
    actions = [(Action.parse(word), value) for word, value in seconds.items()]
    assert seconds_of_forward(actions) == 2.5
    assert seconds_of_forward(actions[2:3]) is None


def test_ten_steps_of_a_comparison_are_timed_also_in_windows_of_several() -> None:
    watched = watch(Others(["a", "b"]))
    timed = []
    for _ in range(20):
        timed.append(watched.times(1) is not None)
        watched.count(1, None)
    assert timed == [False, True] * 10
    timed = []
    for _ in range(5):
        timed.append(watched.times(3) is not None)
        watched.count(3, None)
    assert timed == [True] * 5
    on_one_machine = SimpleNamespace(world=Others(["a", "a"]))
    assert SlowMachines(cast(Pipeline, on_one_machine), EVERY).times(EVERY) is None


def _messages(folder: str) -> list[str]:
    """Of a training in which process 1, on a machine of its own, takes three times as long after some steps."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(slow_machines.__name__).addHandler(handler)
    rank, calls = dist.get_rank(), 0
    socket.gethostname = lambda: f"host{rank}"
    made = trainer(Path(folder), slow_machine_steps=2, max_steps=6)

    def seconds(actions: Any) -> float | None:
        nonlocal calls
        kinds = [action.kind for action, _ in actions]
        if not kinds:  # of the plan, which this training has not
            return None
        calls += 1
        assert kinds.count(FORWARD) == 2
        return 3.0 if rank == 1 and calls > 2 else 1.0

    slow_machines.seconds_of_forward = seconds
    made.train()
    return found


def test_the_main_process_of_a_training_names_the_machine(tmp_path: Path) -> None:
    first, second = run_gloo(_messages, 2, str(tmp_path))
    (message,) = first
    expected = "in the last 2 steps process 1 (stage 1) computed 3.0 times as long as in its first steps"
    assert message.startswith(f"machine host1 is slow: {expected},")
    assert second == []
