"""A large bubble is named with a change that lowers it, and every change that is named was planned and fits."""

from __future__ import annotations

import re
from dataclasses import replace

from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.report import report, verdict
from hf_gpipe.planner.search.advice import smaller_bubble
from hf_gpipe.planner.search.listed import with_table_file
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import build
from hf_gpipe.text import seconds_text
from tests.planner.models import DEVICE, MIB, blocks, settings


def planner(rows: int, memory_bytes: int | None = None) -> Planner:
    """Of eight blocks whose costs grow with the rows of a micro-batch."""
    inputs = PlanInputs(Workload(rows, 1, 1), optim="sgd")
    costs = {n: blocks(8, weights=MIB, flops=n, boundary=n * MIB, saved=5 * n * MIB) for n in range(1, rows + 1)}
    return Planner(lambda rows, _: [costs[rows]], inputs, DEVICE, memory_bytes)


def test_more_micro_batches_or_another_schedule() -> None:
    """A plan of four stages and four micro-batches waited for 43 % of its step, and no word was said about it."""
    plan = planner(16).plan(settings((2, 2, 2, 2), 4))
    assert 0.42 < plan.bubble < 0.44
    found = re.fullmatch(
        r"pipeline.num_micro_batches=(\d+) with pipeline.schedule=(\w+) fits: a step of (.*) with a bubble of (.*)",
        smaller_bubble(plan),
    )
    assert found is not None
    changed = plan.planner.plan(plan.settings.replace(num_micro_batches=int(found[1]), schedule=found[2]))
    assert found.groups()[2:] == (seconds_text(changed.step_seconds), f"{changed.bubble:.1%}")
    assert changed.bubble < plan.bubble
    assert changed.step_seconds < plan.step_seconds
    why = "devices wait for 43% of the step: 4 micro-batches are few for 4 devices in a row"
    assert report(plan).startswith(f"verdict     {verdict(plan)}\n")
    assert verdict(plan).endswith(f", but {why}; {found[0]}")


def test_a_change_that_does_not_fit_is_not_named() -> None:
    plan = planner(16).plan(settings((2, 2, 2, 2), 4, recompute="stage"))
    tight = planner(16, plan.peak_bytes).plan(plan.settings)
    for text in (smaller_bubble(plan), smaller_bubble(tight)):
        found = re.match(r"(?:pipeline.num_micro_batches=(\d+))?(?: with )?(?:pipeline.schedule=(\w+))? fits", text)
        assert found is not None
        values = {"num_micro_batches": int(found[1] or 4), "schedule": found[2] or "gpipe"}
        assert tight.planner.plan(plan.settings.replace(**values)).fits or text == smaller_bubble(plan)


def test_a_larger_mini_batch_where_each_row_is_a_micro_batch_already() -> None:
    assert smaller_bubble(planner(8).plan(settings((4, 4), 8))) == "", "its bubble is small"
    plan = planner(2).plan(settings((2, 2, 2, 2), 2, schedule="1f1b"))
    text = smaller_bubble(plan)
    found = re.match(r"a mini-batch of 8 rows .* with pipeline.num_micro_batches=8 fits: a step of (.*) with a", text)
    assert found is not None, text
    changed = planner(8).plan(plan.settings.replace(num_micro_batches=8))
    assert found[1] == seconds_text(changed.step_seconds)
    assert changed.step_seconds / 8 < plan.step_seconds / 2


def test_what_devices_wait_for_is_said_where_nothing_lowers_it() -> None:
    """A plan whose devices waited for 21 % of the step had no line about it, and one with 66 % fitted."""
    given = planner(16)
    given.inputs = replace(given.inputs, tables={"mine.txt": build("gpipe", 2, 3, recompute="none")})
    plan = given.plan(settings((4, 4), 3, schedule="mine.txt"))
    assert smaller_bubble(plan) == ""
    waits = "devices wait for 25% of the step: 3 micro-batches are few for 2 devices in a row"
    assert f"\nbubble      {waits}\n" in report(plan)
    uneven = planner(16).plan(settings((1, 7), 16))
    assert "% of the step: stage 1 computes 1.8 times as long as the mean; " in verdict(uneven)


def test_a_larger_mini_batch_that_fits_by_recomputation() -> None:
    """A plan of 32 devices had no advice, because twice as many micro-batches fit only if some are recomputed."""
    plan = planner(2).plan(settings((2, 2, 2, 2), 2, schedule="1f1b"))
    tight = planner(2, plan.peak_bytes).plan(plan.settings)
    found = re.match(
        r"a mini-batch of 8 rows .* with pipeline.num_micro_batches=8 pipeline.recompute=auto fits: a step",
        smaller_bubble(tight),
    )
    assert found is not None, smaller_bubble(tight)


def test_a_table_that_was_made_for_the_plan_has_advice_too() -> None:
    """Plans with schedule auto had none, because their tables were taken for tables of the user."""
    plan = planner(2).plan(settings((2, 2, 2, 2), 2, schedule="1f1b"))
    made = with_table_file(plan, plan.settings, build("1f1b", 4, 2, recompute="none"))
    words = "a mini-batch of 8 rows .* with pipeline.num_micro_batches=8 pipeline.schedule=1f1b fits: a step of"
    assert re.match(words, smaller_bubble(made))


def test_nothing_is_said_of_a_plan_that_does_not_fit_or_has_its_own_table() -> None:
    plan = planner(16).plan(settings((2, 2, 2, 2), 4))
    assert smaller_bubble(planner(16, plan.peak_bytes - 1).plan(plan.settings)) == ""
    table = build("gpipe", 4, 4, recompute="none")
    given = planner(16)
    given.inputs = replace(given.inputs, tables={"mine.txt": table})
    assert smaller_bubble(given.plan(plan.settings.replace(schedule="mine.txt"))) == ""
