"""The search of `hf-gpipe plan --search`, which leaves everything open and shows more than the best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from operator import attrgetter

from hf_gpipe.errors import PartitionError, UserError
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import allowed_plans, can_run, first_micro_batches
from hf_gpipe.planner.search.listed import with_table
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        fastest: the best plan of each mesh that fits, the fastest first. The first may have a table that was made for
            it.
        leanest: the plan that needs the least memory.
        ways: the best plan without the modes that move weights, and with each of them, whether it fits or not.
        num_tried: the number of plans that were tried.
        least: the division among the fewest ranks with which all weights fit the devices, if fewer do not suffice.
    """

    fastest: tuple[Plan, ...]
    leanest: Plan
    num_tried: int
    least: Division | None = None
    ways: tuple[Plan, ...] = ()


def search_all(asked: Iterable[tuple[Planner, PipelineConfig]]) -> SearchResult:
    """Search with the planner of each division of layers, the smallest first, and merge the results.

    Raises:
        PartitionError: there is no split at all. It is the first planner's error.
    """
    results, errors = [], []
    for planner, config in asked:
        try:
            results.append(search(planner, config))
        except PartitionError as error:
            errors.append(error)
    if not results:
        raise errors[0]
    fastest = sorted((plan for result in results for plan in result.fastest), key=_speed)
    stay = [[plan for plan in result.fastest if not way_of(plan)] for result in results]
    least = min((plan.planner.division for own in stay for plan in own), default=None, key=attrgetter("num_ranks"))
    is_first = not errors and bool(stay[0])
    leanest = min((result.leanest for result in results), key=_leanness)
    ways = tuple(_first_of_each(way_of, (plan for result in results for plan in result.ways)))
    return SearchResult(
        tuple(fastest), leanest, sum(result.num_tried for result in results), None if is_first else least, ways
    )


def search(planner: Planner, config: PipelineConfig) -> SearchResult:
    """Try K, replicas, the order of the processes, M, schedule, recomputation and partition on a number of processes.

    The configuration itself is tried too. The other ones keep of it what `PipelineConfig.with_auto` keeps.

    Raises:
        PartitionError: there is no split at all.
    """
    free = config.with_auto(config.processes)
    plans = allowed_plans(planner, free)
    asked = [] if config.is_mesh_open else [config]
    stay = [plan for plan in _first_of_each(_mesh_of, plans) if not way_of(plan)]
    for each in (*asked, *_lean(planner, stay)):
        try:
            plans += allowed_plans(planner, each)
        except UserError:
            continue
    ways = tuple(with_table(plan, free) for plan in _first_of_each(way_of, plans))
    fitting = _first_of_each(_mesh_of, (plan for plan in plans if plan.fits))
    if fitting:
        made = [plan for plan in ways if plan.fits]
        fitting = _first_of_each(_mesh_of, [*made, *fitting], _speed)
    fitting = [*dropwhile(lambda plan: not can_run(plan), fitting)]
    return SearchResult(tuple(fitting), min(plans, key=_leanness), len(plans), ways=ways)


def way_of(plan: Plan) -> str:
    """Words for the mode that moves a plan's weights; empty: they stay on their devices."""
    return next(filter(None, (way(plan) for way in functions_of_modes("search", "way"))), "")


def _first_of_each(
    kind: Callable[[Plan], object],
    plans: Iterable[Plan],
    key: Callable[[Plan], tuple[float, ...]] = attrgetter("sort_key"),
) -> list[Plan]:
    """The first plan of each kind, in the order of a key: by default the best first."""
    first: dict[object, Plan] = {}
    for plan in sorted(plans, key=key):
        first.setdefault(kind(plan), plan)
    return list(first.values())


def _speed(plan: Plan) -> tuple[float, float]:
    return plan.step_seconds, plan.peak_bytes


def _leanness(plan: Plan) -> tuple[float, float]:
    return plan.fullness, plan.step_seconds


def _mesh_of(plan: Plan) -> object:
    return plan.timeline.schedule.placement, way_of(plan)


def _lean(planner: Planner, plans: list[Plan]) -> Iterator[PipelineConfig]:
    """Yield the mesh with the most stages and the best plan's mesh, unchanged and with the least memory."""
    if not plans:
        return
    most = max(plans, key=lambda plan: plan.settings.num_stages)
    for plan in (most,) if most is plans[0] else (most, plans[0]):
        for recompute in (AUTO, "block", "stage"):
            config = plan.settings.reopened(
                schedule="1f1b", recompute=recompute, partition=AUTO, num_micro_batches=AUTO
            )
            yield config.replace(num_micro_batches=first_micro_batches(planner, config)[-1])
