from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.from_recipe.timeline import measure_step
from hf_gpipe.schedule import Timeline, breakdown
from hf_gpipe.schedule.kinds import UPDATE
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config

UPDATE_SECONDS = 0.05


def _measure(update_seconds: float | None) -> tuple[Timeline, Timeline, bool]:
    pipe = Pipeline(tiny_config("marian"), 3, 2, "1f1b", "stage", device="cpu")
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    update = None if update_seconds is None else lambda loss, norm: time.sleep(update_seconds)
    measured, predicted = measure_step(pipe, [padded_batch(pipe.adapter.config)], repeats=3, update=update)
    unchanged = all(map(torch.equal, before, pipe.parameters())) and pipe.step == 0
    return measured, predicted, unchanged and all(parameter.grad is None for parameter in pipe.parameters())


def check(measured: Timeline, predicted: Timeline, unchanged: bool) -> None:
    assert unchanged
    schedule = measured.schedule
    assert schedule == predicted.schedule
    for process, actions in enumerate(schedule.actions):
        spans = [span for span in measured.spans if span.process == process]
        assert [span.action for span in spans] == list(actions)
        assert all(one.end <= following.start + 1e-9 for one, following in pairwise(spans))
        assert all(span.computing >= 0 and span.waiting >= 0 and span.sending >= 0 for span in spans)
    for parts in breakdown(measured).processes:
        assert parts.total == pytest.approx(measured.total_seconds)
        assert parts.forward > 0
        assert parts.backward > 0


def test_a_step_in_one_process() -> None:
    measured, predicted, unchanged = _measure(None)
    check(measured, predicted, unchanged)
    assert breakdown(measured).mean.update < UPDATE_SECONDS


def test_two_processes_and_the_update() -> None:
    first, second = run_gloo(_measure, 2, UPDATE_SECONDS)
    assert first[:2] == second[:2]
    for measured, predicted, unchanged in (first, second):
        check(measured, predicted, unchanged)
    for parts in breakdown(first[0]).processes:
        assert parts.update >= UPDATE_SECONDS * 0.9
        assert parts.send > 0
    assert sum(float(s.computing) for s in first[1].spans if s.action.kind == UPDATE) >= 2 * UPDATE_SECONDS * 0.9
    assert breakdown(first[0]).processes[1].wait > 0, "it waits for its first message"
