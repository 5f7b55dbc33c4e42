"""Plans of PipeDream's schedules: stashes are counted, a window's ends shared out, and a synchronous plan is beside."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.memory import MemoryBound
from hf_gpipe.planner.report import as_dict, report
from hf_gpipe.planner.search.choose import AUTO_SCHEDULES
from hf_gpipe.planner.traffic import traffic
from hf_gpipe.schedule import LONGEST_WINDOW, window_schedules
from tests.planner.models import MIB, blocks, planner, settings


def test_a_step_of_a_window_and_its_stashes() -> None:
    """Four equal stages of 10 MiB of weights; a micro-batch takes 1 s forward and 2 s backward on each."""
    toy = planner(blocks(4), rows=1)
    stashing, double, flush = (
        toy.plan(settings((1, 1, 1, 1), 1, schedule=name)) for name in ("pipedream", "pipedream_2bw", "1f1b")
    )
    assert [stage.memory.stashes for stage in stashing.stages] == [30 * MIB, 20 * MIB, 10 * MIB, 0]
    assert {stage.memory.stashes for stage in double.stages} <= {0, 10 * MIB}
    assert flush.stages[0].memory.stashes == 0
    assert flush.step_seconds == pytest.approx(4 * 3, rel=1e-3)
    assert stashing.step_seconds == pytest.approx(3 * (LONGEST_WINDOW + 3) / LONGEST_WINDOW, rel=1e-3)
    for process in stashing.processes:
        assert process.time.backward == pytest.approx(2)
        assert sum(asdict(process.time).values()) == pytest.approx(stashing.step_seconds)
    assert stashing.stages[0].busy_seconds == pytest.approx(3, rel=1e-3)
    assert traffic(stashing) == traffic(flush)
    bound = MemoryBound(toy.layout(stashing.settings))
    assert bound.stage_bytes(0, StageLayers(0, 1, "none")) == pytest.approx(stashing.stages[0].memory.total, rel=0.05)


def test_the_report_says_what_a_plan_cannot_know() -> None:
    plan = planner(blocks(3), rows=2).plan(settings((1, 1, 1), 2, schedule="pipedream"))
    text = report(plan)
    assert "as 2 micro-batches" in text
    assert "gradients of the stages come 1-1-0 updates late; what that costs in loss a plan cannot know" in text
    assert "1f1b, with the plain model's numbers: 6 s a row, here 3" in text
    assert json.loads(json.dumps(as_dict(plan)))["processes"][0]["memory_bytes"]["stashes"] == 10 * MIB
    assert not set(AUTO_SCHEDULES) & set(window_schedules())


def test_replicas_keep_stashes_and_reduce_in_each_step() -> None:
    """2-1 with a micro-batch for each replica in a step: the first stage is one update late."""
    toy = planner(blocks(2), rows=2)
    plan = toy.plan(settings((1, 1), 2, schedule="pipedream", replicas=(2, 1), num_processes=3))
    assert [process.memory.stashes for process in plan.processes] == [10 * MIB, 10 * MIB, 0]
    flush = toy.plan(settings((1, 1), 2, schedule="1f1b", replicas=(2, 1), num_processes=3))
    assert traffic(plan) == traffic(flush)
    assert plan.step_seconds < flush.step_seconds
