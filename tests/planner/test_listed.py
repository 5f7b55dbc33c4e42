"""Tables that are made for a plan: shorter within the same limit, and only where the configuration leaves that open."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

from hf_gpipe.planner.costs.model_costs import Operations
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import allowed_plans, best_plan
from hf_gpipe.planner.search.listed import TABLE_FILE
from hf_gpipe.schedule.kinds import RECOMPUTE
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.planner.models import MIB, layer, model, planner

OPEN = PipelineConfig(4, 8, "auto", "auto", partition=(1, 1, 1, 1))


def limited(graphs: float, last: int = 1) -> Planner:
    """For four layers whose graphs are 15 MiB, in processes with room for so many; the last layer is slower."""
    layers = (layer(f"h.{i}", weights=4, saved=15 * MIB, block_saved=15 * MIB, flops=1) for i in range(4))
    split = [replace(one, weight_flops=1, deferred_bytes=10 * MIB) for one in layers]
    split[-1] = replace(split[-1], backward=Operations(1 + last))
    return planner(model(*split), rows=8, memory_bytes=int((16 * graphs + 1.2) * MIB))


def best_named(of: Planner, config: PipelineConfig) -> Plan:
    return min(allowed_plans(of, config), key=attrgetter("sort_key"))


@pytest.mark.parametrize(("graphs", "last"), [(1.5, 1), (2, 1), (2, 2)])
def test_a_made_table_is_shorter_within_the_limit(graphs: float, last: int) -> None:
    plan, named = best_plan(limited(graphs, last), OPEN), best_named(limited(graphs, last), OPEN)
    assert plan.settings.schedule == TABLE_FILE
    assert plan.fits
    assert named.fits
    assert plan.step_seconds < 0.95 * named.step_seconds
    assert RECOMPUTE in plan.timeline.schedule.kinds


def test_none_is_made_where_that_is_not_left_open() -> None:
    of = limited(2)
    for changes in ({"schedule": "1f1b"}, {"recompute": "stage"}, {"torch_compile": True}):
        config = OPEN.replace(**changes)
        plan = best_plan(of, config)
        assert plan.settings == best_named(of, config).settings
    assert RECOMPUTE not in best_plan(of, OPEN.replace(recompute="none")).timeline.schedule.kinds


def test_what_is_not_given_is_open_and_the_same_table_is_made_again() -> None:
    not_given = OPEN.replace(schedule=None, recompute=None).with_defaults(can_plan=True)
    one, other = best_plan(limited(2), not_given), best_plan(limited(2), OPEN)
    assert one.settings.schedule == TABLE_FILE
    assert one.timeline.schedule == other.timeline.schedule


def test_a_named_schedule_that_is_as_short_stays() -> None:
    config = OPEN.replace(num_stages=2, partition=(2, 2))
    assert best_plan(limited(20), config).settings.schedule == "zb_h1"
