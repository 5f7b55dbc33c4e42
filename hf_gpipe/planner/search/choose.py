"""The choice of what a configuration leaves open: the fastest plan that fits.

For each schedule, M and mesh the model is cut, what to recompute is chosen (cut.py), and the step is simulated. Where
stages or replicas are open, the choice is a search by single steps, which begins with even meshes (meshes.py). Where
the schedule is open, a table is made for the best plan in the end (listed.py).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

from hf_gpipe.errors import PartitionError, ScheduleError, UserError
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.cut import Outcome, outcome_of
from hf_gpipe.planner.search.listed import with_table
from hf_gpipe.planner.search.meshes import Meshes, with_mesh
from hf_gpipe.registry import functions_of_modes, parts_of_modes
from hf_gpipe.schedule import (
    SPLIT_SCHEDULES,
    V_SHAPED,
    Placement,
    check_once,
    replicas_of,
)
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
        planner: the planner of the model, its mini-batch and its device.
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
    for asked in ways_of_modes(planner, config):
        try:
            outcomes += _Search(*asked).outcomes()
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


class _Search:
    """The search for what a configuration leaves open, in which the keys of modes are decided.

    Args:
        planner: the planner of the model and these modes.
        asked: the configuration.
    """

    def __init__(self, planner: Planner, asked: PipelineConfig) -> None:
        self._planner, self._asked = planner, asked
        self._counts = micro_batch_counts(planner.rows, asked.num_micro_batches)
        self._schedules: Sequence[str] = (asked.schedule,)
        if asked.schedule == AUTO:
            excluded = {mode for mode in _OF_MODES.values() if asked.excluding(mode)}
            self._schedules = [name for name in AUTO_SCHEDULES if _OF_MODES.get(name) not in excluded]

    def outcomes(self) -> list[Outcome]:
        """The outcomes that are worth a try. Raises UserError where there is none."""
        planner, asked = self._planner, self._asked
        for of_mode in functions_of_modes("search", "outcomes"):
            if (found := of_mode(planner, asked, self._counts)) is not None:
                return list(found)
        return self._of_meshes() if asked.is_mesh_open else [outcome_of(planner, each) for each in self._allowed()]

    def _allowed(self) -> list[PipelineConfig]:
        """The configuration with its schedule and M decided, in every way that is worth a try.

        Raises:
            UserError: M is "auto", and a step has too few rows for the replicas of a stage.
        """
        if self._asked.num_micro_batches == AUTO:
            self._check_rows(max(replicas_of(*self._asked.mesh)))
        ways = [
            self._asked.replace(schedule=schedule, num_micro_batches=count)
            for schedule in self._schedules
            for count in self._counts
        ]
        return [*filter(self._is_worth_a_try, ways)]

    def _of_meshes(self) -> list[Outcome]:
        """The outcomes of the first meshes, and of steps from the best plans, as long as plans get better."""
        meshes = Meshes(self._planner, self._asked)
        outcomes: dict[PipelineConfig, Outcome] = {}
        waiting = self._first(meshes.first())
        while ways := [*self._affordable(waiting, outcomes)]:
            outcomes |= {way: outcome_of(self._planner, way) for way in ways}
            steps = dict.fromkeys(self._steps(outcomes, meshes))
            new = [step for step in steps if step not in outcomes and self._is_worth_a_try(step)]
            waiting = new[:_STEPS_AT_ONCE]
        return list(outcomes.values())

    def _first(self, placements: Sequence[Placement]) -> list[PipelineConfig]:
        """The configurations with which the search begins. Those that take the least work come first.

        Raises:
            UserError: there is no mesh, or a mini-batch has too few rows for the replicas of any.
        """
        planner, asked = self._planner, self._asked
        if not placements:
            raise UserError(
                f"no mesh of {asked.processes} processes has num_stages={asked.num_stages} and replicas="
                f"{asked.replicas} for a model of {planner.num_layers} layers; use another number of processes, or let "
                "both be auto."
            )
        self._check_rows(min(max(placement.replicas) for placement in placements))
        schedules = _FIRST_SCHEDULES if asked.schedule == AUTO else self._schedules
        counts, first = first_micro_batches(planner, asked), []
        for placement in placements:
            for count in counts if len(set(placement.replicas)) == 1 else counts[:1]:
                mesh = with_mesh(asked, placement).replace(num_micro_batches=count)
                ways = (mesh.replace(schedule=schedule) for schedule in schedules)
                first += [*filter(self._is_worth_a_try, ways)][:1]
        return sorted(first, key=partial(work, planner))

    def _steps(self, outcomes: Mapping[PipelineConfig, Outcome], meshes: Meshes) -> Iterator[PipelineConfig]:
        """Yield configurations one step from the best plans: another schedule, another M, or a mesh one step away."""
        counts, schedules = self._counts, self._schedules
        ranked = sorted(outcomes, key=lambda config: _sort_key(outcomes[config]))
        of_meshes: dict[object, PipelineConfig] = {}
        for config in ranked:
            of_meshes.setdefault((config.mesh, config.placement), config)
        configs = list(of_meshes.values())
        outcome = outcomes[configs[0]]
        if not isinstance(outcome, Plan) or not outcome.fits:
            # More micro-batches, and the first schedule, need less memory.
            larger = [count for count in counts if count > int(configs[0].num_micro_batches)]
            if larger:
                yield configs[0].replace(num_micro_batches=larger[0])
                yield configs[0].replace(schedule=schedules[0])
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
            rest = self._asked.replace(schedule=config.schedule, num_micro_batches=config.num_micro_batches)
            outcome = outcomes[config]
            near = outcome.slowest_stage.number if isinstance(outcome, Plan) else 0
            yield from (with_mesh(rest, placement) for placement in meshes.beside(config.placed("gpipe"), near))
        for config in configs[:_NUM_RESCHEDULED]:
            yield from (config.replace(schedule=schedule) for schedule in schedules)

    def _affordable(
        self, configs: Sequence[PipelineConfig], done: Iterable[PipelineConfig]
    ) -> Iterator[PipelineConfig]:
        """The first configurations for which there is time after those that are done."""
        spent = sum(work(self._planner, config) for config in done)
        for config in configs:
            if spent < MOST_WORK:
                yield config
            spent += work(self._planner, config)

    def _check_rows(self, replicas: int) -> None:
        """Raise UserError where a step has too few micro-batches for so many replicas."""
        most = max(map(self._planner.micro_batches_of_step, self._counts))
        if most < replicas:
            raise UserError(
                f"a step has at most {most} micro-batches and a stage has {replicas} replicas, which take them in "
                "turn: some would never get one; use more micro-batches, more rows in a mini-batch, or fewer replicas."
            )

    def _is_worth_a_try(self, config: PipelineConfig) -> bool:
        """Whether a decided M and schedule are worth a try: every replica gets a micro-batch where M was open, and an
        open schedule can run on the processes and does not equal another schedule there."""
        planner, asked = self._planner, self._asked
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
