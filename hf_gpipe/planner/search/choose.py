"""The choice of what a configuration leaves open: the fastest plan that fits.

For each schedule, M and mesh the model is cut, what to recompute is chosen (cut.py), and the step is simulated. Where
stages or replicas are open, the choice is a search by single steps, which begins with even meshes (meshes.py). Where
the schedule is open, a table is made for the best plan in the end (listed.py).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from operator import attrgetter

from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.cut import Outcome, outcome_of
from hf_gpipe.planner.search.listed import with_table
from hf_gpipe.planner.search.meshes import Meshes, with_mesh
from hf_gpipe.registry import functions_of_modes, parts_of_modes
from hf_gpipe.schedule import SPLIT_SCHEDULES, V_SHAPED, check_once, replicas_of
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig

#: The schedules of modes that "auto" chooses from -> the mode.
_OF_MODES = {
    name: mode for mode, search in parts_of_modes("search").items() for name in getattr(search, "SCHEDULES", ())
}
AUTO_SCHEDULES = ("1f1b", "gpipe_fused", "gpipe", "interleaved_1f1b", *SPLIT_SCHEDULES, *_OF_MODES)
"""The schedules that "auto" chooses from. The first of equally good schedules is chosen."""

#: The schedules under which meshes are compared at first: a mesh gets the first that it can run.
_FIRST_SCHEDULES = ("zb_h2", "zb_v", "1f1b")
#: The numbers of micro-batches for each process with which the search begins.
_FIRST_MICRO_BATCHES = 1, 4
#: The number of meshes whose schedules are all tried, and of meshes with one stage a process that are improved.
_NUM_RESCHEDULED, _NUM_IMPROVED = 10, 3
#: The number of steps after which the best plans are looked for again.
_STEPS_AT_ONCE = 12
#: The work of one search, in actions that are simulated: some seconds.
MOST_WORK = 60_000
#: The work of a plan beside the simulation of its actions.
_WORK_OF_PLAN = 200

#: The thresholds of Python's garbage collector during a search, unless larger ones are set.
_COLLECTED_AFTER = 50_000, 20, 100


def best_plan(planner: Planner, config: PipelineConfig) -> Plan:
    """The fastest plan that a configuration allows and that fits; where none fits, the plan that needs least memory.

    Args:
        config: a value or "auto" for everything, and the number of processes where stages or replicas are "auto". The
            limit of memory is the planner's.

    Raises:
        PartitionError: the partition is by cost, and no split of any allowed plan meets the limit.
        UserError: no pipeline could run what the configuration asks for.
    """
    plans = sorted(allowed_plans(planner, config), key=attrgetter("sort_key"))
    best = next(filter(can_run, plans), None)
    if best is None:
        check_once(plans[0].timeline.schedule)  # raises
        best = plans[0]
    return with_table(best, config)


def can_run(plan: Plan) -> bool:
    """Whether every process can run the table of a plan to its end. The comparison of plans does not check this."""
    try:
        check_once(plan.timeline.schedule)
    except ScheduleError:
        return False
    return True


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Let Python look for garbage in cycles less often: planning makes millions of objects, and hardly any cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*map(max, before, _COLLECTED_AFTER) if before[0] else before)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_collecting_rarely()
def allowed_plans(planner: Planner, config: PipelineConfig) -> list[Plan]:
    """The plans with named schedules that a configuration allows and that are worth a try, at least one. Raises the
    errors of `best_plan`."""
    outcomes: list[Outcome] = []
    for way in ways_of_modes(planner, config):
        try:
            outcomes += _outcomes(*way)
        except UserError as error:
            outcomes.append(error)
    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    if not plans:
        raise min((outcome for outcome in outcomes if isinstance(outcome, UserError)), key=_sort_key)
    return plans


def ways_of_modes(planner: Planner, config: PipelineConfig) -> list[tuple[Planner, PipelineConfig]]:
    """The configuration with what the keys of modes leave open decided, in every way, and the planner for each."""
    ways = [(planner, config)]
    for decided in functions_of_modes("search", "ways"):
        ways = [way for asked in ways for way in decided(*asked)]
    return ways


def _outcomes(planner: Planner, asked: PipelineConfig) -> list[Outcome]:
    """The outcomes that are worth a try, where the keys of modes are decided. Raises UserError where there is none."""
    counts = micro_batch_counts(planner.rows, asked.num_micro_batches)
    for of_mode in functions_of_modes("search", "outcomes"):
        if (found := of_mode(planner, asked, counts)) is not None:
            return list(found)
    outcomes: dict[PipelineConfig, Outcome] = {}
    for config in candidates(planner, asked, outcomes):
        outcomes[config] = outcome_of(planner, config)
    return list(outcomes.values())


def candidates(
    planner: Planner, asked: PipelineConfig, outcomes: Mapping[PipelineConfig, Outcome]
) -> Iterator[PipelineConfig]:
    """Yield a configuration with its mesh, schedule and M decided, in every way that is worth a try.

    Where the mesh is open, the ways are the first meshes, and then steps from the best plans, as long as there are new
    ones and time for them.

    Args:
        asked: the configuration, in which the keys of modes are decided.
        outcomes: the outcome of each configuration that was yielded before.

    Raises:
        UserError: there is no mesh, or a step has too few rows for the replicas of a stage.
    """
    counts = micro_batch_counts(planner.rows, asked.num_micro_batches)
    excluded = {mode for mode in _OF_MODES.values() if asked.excluding(mode)}
    schedules: Sequence[str] = [name for name in AUTO_SCHEDULES if _OF_MODES.get(name) not in excluded]
    is_schedule_open, is_mesh_open = asked.schedule == AUTO, asked.is_mesh_open
    schedules = schedules if is_schedule_open else [asked.schedule]
    is_worth_a_try = partial(_is_worth_a_try, planner, asked)
    placements = (meshes := Meshes(planner, asked)).first() if is_mesh_open else []
    if is_mesh_open and not placements:
        raise UserError(
            f"no mesh of {asked.processes} processes has num_stages={asked.num_stages} and replicas="
            f"{asked.replicas} for a model of {planner.num_layers} layers; use another number of processes, or let "
            "both be auto."
        )
    if is_mesh_open or asked.num_micro_batches == AUTO:
        every = [placement.replicas for placement in placements] or [replicas_of(*asked.mesh)]
        replicas, most = min(map(max, every)), max(map(planner.micro_batches_of_step, counts))
        if most < replicas:
            raise UserError(
                f"a step has at most {most} micro-batches and a stage has {replicas} replicas, which take them in "
                "turn: some would never get one; use more micro-batches, more rows in a mini-batch, or fewer replicas."
            )
    if not is_mesh_open:
        ways = (asked.replace(schedule=own, num_micro_batches=count) for own in schedules for count in counts)
        yield from filter(is_worth_a_try, ways)
        return
    waiting, spent, first_counts = [], 0, first_micro_batches(planner, asked)
    for placement in placements:
        for count in first_counts if len(set(placement.replicas)) == 1 else first_counts[:1]:
            mesh = with_mesh(asked, placement).replace(num_micro_batches=count)
            ways = (mesh.replace(schedule=own) for own in (_FIRST_SCHEDULES if is_schedule_open else schedules))
            waiting += [*filter(is_worth_a_try, ways)][:1]
    # Those that take the least work come first.
    waiting.sort(key=partial(work, planner))
    while waiting:
        for config in waiting:
            if spent >= MOST_WORK:
                return
            yield config
            spent += work(planner, config)
        steps = dict.fromkeys(_steps(asked, outcomes, meshes, schedules, counts))
        waiting = [step for step in steps if step not in outcomes and is_worth_a_try(step)][:_STEPS_AT_ONCE]


def _steps(
    asked: PipelineConfig,
    outcomes: Mapping[PipelineConfig, Outcome],
    meshes: Meshes,
    schedules: Sequence[str],
    counts: Sequence[int],
) -> Iterator[PipelineConfig]:
    """Yield configurations one step from the best plans: another schedule, another M, or a mesh one step away."""
    of_meshes: dict[object, PipelineConfig] = {}
    for config in sorted(outcomes, key=lambda config: _sort_key(outcomes[config])):
        of_meshes.setdefault((config.mesh, config.placement), config)
    configs = list(of_meshes.values())
    first, outcome = configs[0], outcomes[configs[0]]
    if not isinstance(outcome, Plan) or not outcome.fits:
        # More micro-batches, and the first schedule, need less memory.
        if larger := [count for count in counts if count > int(first.num_micro_batches)]:
            yield first.replace(num_micro_batches=larger[0])
            yield first.replace(schedule=schedules[0])
            return
        # Every mesh is tried: a mesh that lacks more memory under its first schedule may fit under this schedule.
        yield from (config.replace(schedule=schedules[0]) for config in configs)
        configs = configs[:1]
    alone = [config for config in configs if config.places == config.processes]
    several = [config for config in configs if config.places != config.processes]
    best = [*alone[:_NUM_IMPROVED], *several[:1]]
    for config in best:
        place = counts.index(int(config.num_micro_batches))
        yield from (config.replace(num_micro_batches=count) for count in counts[max(place - 1, 0) : place + 2])
    for config in best:
        yield from (config.replace(schedule=schedule) for schedule in schedules)
        rest = asked.replace(schedule=config.schedule, num_micro_batches=config.num_micro_batches)
        outcome = outcomes[config]
        near = outcome.slowest_stage.number if isinstance(outcome, Plan) else 0
        yield from (with_mesh(rest, placement) for placement in meshes.beside(config.placed("gpipe"), near))
    for config in configs[:_NUM_RESCHEDULED]:
        yield from (config.replace(schedule=schedule) for schedule in schedules)


def _is_worth_a_try(planner: Planner, asked: PipelineConfig, config: PipelineConfig) -> bool:
    """Whether a decided M and schedule are worth a try: every replica gets a micro-batch where M was open, and an open
    schedule can run on the processes and does not equal another schedule there."""
    num_stages, replicas = config.mesh
    counts, schedule = replicas_of(num_stages, replicas), config.schedule
    is_open = asked.is_mesh_open or asked.num_micro_batches == AUTO
    if is_open and planner.micro_batches_of_step(int(config.num_micro_batches)) < max(counts):
        return False
    if asked.schedule != AUTO:
        return True
    if schedule == "interleaved_1f1b":
        return config.processes < config.places
    if (mode := _OF_MODES.get(schedule)) is not None:
        return bool(parts_of_modes("search")[mode].is_worth_a_try(planner, config))
    if schedule not in SPLIT_SCHEDULES:
        return True
    # A compiled block has one backward, and in one process no other waits for I.
    if config.compiled.backend is not None or config.places == num_stages * config.processes:
        return False
    if schedule in V_SHAPED:
        return len(set(counts)) == 1 and config.places == 2 * config.processes and config.placement is None
    return config.places == config.processes


def work(planner: Planner, config: PipelineConfig) -> int:
    """The work that a plan takes, as a number of simulated actions."""
    num_stages, _ = config.mesh
    assert isinstance(config.num_micro_batches, int), "it is decided"
    return _WORK_OF_PLAN + 3 * num_stages * planner.micro_batches_of_step(config.num_micro_batches)


def micro_batch_counts(rows: int, asked: int | str) -> list[int]:
    """The numbers of micro-batches that "auto" chooses from: the powers of two up to one per row, and one per row."""
    if isinstance(asked, int):
        return [asked]
    return sorted({rows, *(2**power for power in range(rows.bit_length()))})


def first_micro_batches(planner: Planner, config: PipelineConfig) -> list[int]:
    """The numbers of micro-batches with which the search for a mesh begins: about one and four for each process."""
    counts = micro_batch_counts(planner.rows, config.num_micro_batches)
    wanted = [share * config.processes for share in _FIRST_MICRO_BATCHES]
    return sorted({min((count for count in counts if count >= number), default=counts[-1]) for number in wanted})


def _sort_key(outcome: Outcome) -> tuple[float, ...]:
    """The key of a plan, or of an error. Errors come last, and the error that lacks the least memory is their first."""
    if isinstance(outcome, Plan):
        return outcome.sort_key
    return (2.0, outcome.fullness if isinstance(outcome, PartitionError) else math.inf)


# ---------------------------------------------------------------------- hf-gpipe plan --search


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
    """Try K, replicas, the order of the processes, M, schedule, recomputation and partition on a number of processes.

    Args:
        asked: the planner of each division of layers, the smallest first, with the configuration: it is tried too. The
            other ones keep of it what `PipelineConfig.with_auto` keeps.

    Raises:
        PartitionError: there is no split at all. It is the first planner's error.
    """
    plans, ways, errors, divisions = list[Plan](), list[Plan](), list[PartitionError](), list[Division]()
    for planner, config in asked:
        divisions.append(planner.division)
        free = config.with_auto(config.processes)
        try:
            own = allowed_plans(planner, free)
        except PartitionError as error:
            errors.append(error)
            continue
        stay = [plan for plan in _first_of_each(_mesh_of, own) if not way_of(plan)]
        for each in (*([] if config.is_mesh_open else [config]), *_lean(planner, stay)):
            with suppress(UserError):
                own += allowed_plans(planner, each)
        ways += [with_table(plan, free) for plan in _first_of_each(way_of, own)]
        plans += own
    if not plans:
        raise errors[0]
    fitting = _first_of_each(_mesh_of, (plan for plan in plans if plan.fits))
    fitting = _first_of_each(
        _mesh_of, [*(plan for plan in ways if plan.fits), *fitting], attrgetter("step_seconds", "peak_bytes")
    )
    fitting = [*dropwhile(lambda plan: not can_run(plan), fitting)]
    staying = (plan.planner.division for plan in fitting if not way_of(plan))
    least = min(staying, default=None, key=attrgetter("num_ranks"))
    leanest, ways = min(plans, key=attrgetter("fullness", "step_seconds")), _first_of_each(way_of, ways)
    return SearchResult(tuple(fitting), leanest, len(plans), None if least == divisions[0] else least, tuple(ways))


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


def _mesh_of(plan: Plan) -> object:
    return plan.planner.division, plan.timeline.schedule.placement, way_of(plan)


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
