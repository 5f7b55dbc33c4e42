"""The text of tables, with their simulated time and what each stage holds at most.

The cases are every schedule x K, M, processes, replicas, chunks and recomputation, each mode of a table and pairs of
them, and whether keys of modes go together. All numbers are fractions, so every text is exact on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain, combinations, product
from typing import Any
from zlib import crc32

from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.modes.divided_head.table import HEAD_INPUT, HEAD_WORKING, HELD_LOGITS
from hf_gpipe.modes.host_graphs.table import AWAY, OFFLOAD, PREFETCH, with_offloads
from hf_gpipe.modes.visits.round_robin import deal_of, dealt_table
from hf_gpipe.modes.visits.table import check_visits, with_visits
from hf_gpipe.planner.layout import table_of
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.schedule import (
    Action,
    Costs,
    Placement,
    Schedule,
    build,
    check_table,
    placement_for,
    seconds_of_steps,
    simulate,
)
from hf_gpipe.schedule.kinds import UPDATE, Held
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.occupancy import most_held, most_of_equal_stages
from hf_gpipe.schedule.updates import updates_beside
from hf_gpipe.schedule.zero_bubble import whole_backwards
from hf_gpipe.settings.pipeline import PipelineConfig
from scripts.freezing.results import Entries, exact

FILE = "tables.txt.xz"
tolerance_of = exact

#: Named here, so that a schedule that the package loses is a difference.
PLAIN = ("naive", "gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zb_h2")
V_SHAPED, DIVIDED, DEALT = ("zb_v", "v_half"), ("vocab_gpipe", "vocab_1f1b"), ("round_robin",)
FORWARD_ONLY = ("forward_only", "vocab_forward_only")
SYNCHRONOUS = (*PLAIN, *V_SHAPED, *DIVIDED, *DEALT)
ASYNCHRONOUS = ("pipedream", "pipedream_vertical", "pipedream_2bw", "pipedream_naive")

Make = Callable[[], Schedule]


def names() -> list[str]:
    """The names of all entries, in an order in which large tables are among small ones."""
    return sorted((*_cases(), *_pairs()), key=lambda name: crc32(name.encode()))


def entries(wanted: Sequence[str]) -> Entries:
    """The texts of some entries: of a table, or of the error in its place."""
    cases, pairs = _cases(), _pairs()
    return {name: _told(cases.get(name) or pairs[name]) for name in wanted}


def _told(make: Make) -> str:
    try:
        table = make()
        check_table(table)
        return f"{table.text()}{_numbers(table)}"
    except (ScheduleError, UserError) as error:
        return f"{type(error).__name__}: {error}"


#: The things held, in the order in which the results have them.
_SHOWN: tuple[str, ...] = (
    *chain.from_iterable((kind, AWAY) if kind is Held.GRAPH else (kind,) for kind in Held),
    *(HEAD_INPUT, HELD_LOGITS, HEAD_WORKING),
)
#: What a thing was called when the tables were frozen.
_EARLIER: dict[str, str] = {Held.LEAVING_GRADIENTS: "gradients of visiting weights"}


def _numbers(table: Schedule) -> str:
    """Seconds, bubble and peaks of a table, with equal stages and with stages that differ."""
    lines = []
    for what, costs in (("equal", _equal(table)), ("unequal", _unequal(table))):
        timeline = simulate(table, costs)
        steps = seconds_of_steps(table, costs, 3)
        lines.append(f"{what}: {timeline.total_seconds} seconds, bubble {timeline.bubble}, three steps {steps}")
        if table.is_training:
            most = most_of_equal_stages(table) if what == "equal" else None
            for stage in range(table.num_stages):
                held = most[stage] if most is not None else most_held(timeline, stage)
                shown = ", ".join(f"{_EARLIER.get(kind, kind)} {held[kind]}" for kind in _SHOWN if held[kind])
                lines.append(f"stage {stage}: {shown}")
    return "\n".join(lines)


def _equal(table: Schedule) -> Costs:
    others: dict[str, Any] = {kind: kind.ticks for kind in table.kinds if not kind.price}
    others |= dict.fromkeys((OFFLOAD, PREFETCH), 1)
    return Costs(1, 2, input_seconds=1, weight_seconds=1, others=others)


def _unequal(table: Schedule) -> Costs:
    """Costs of stages, chunks and boundaries that differ, with messages, reductions and updates that take time."""
    stages, chunks = range(table.num_stages), range(table.group_size)

    def each(first: int, times: int) -> list[Any]:
        of_stages = [[Fraction(times * (first + (2 * s) % 5 + c), 2) for c in chunks] for s in stages]
        return [own if len(own) > 1 else own[0] for own in of_stages]

    others: dict[str, Any] = {
        kind: [Fraction(2 + (3 * s) % 4, 4) for s in stages] for kind in table.kinds if not kind.price
    }
    return Costs(
        forward_seconds=each(3, 1),
        backward_seconds=each(4, 2),
        recompute_seconds=each(2, 1),
        input_seconds=each(3, 1),
        weight_seconds=each(1, 1),
        update_seconds=[Fraction(s % 3, 2) for s in stages],
        transfer_seconds=[Fraction(1 + s % 2, 3) for s in stages[:-1]],
        reduce_seconds=[Fraction(2 + s % 3) for s in stages],
        turn_transfer_seconds=Fraction(1, 6),
        others=others,
    )


def _table(
    schedule: str,
    stages: int,
    count: int,
    processes: int,
    replicas: int | Sequence[int] = 1,
    recompute: str | tuple[int | None, ...] = "none",
    *,
    chunks: int = 1,
    steps: Sequence[int] | None = None,
    host: Sequence[int] = (),
    visitors: str | None = None,
    is_beside: bool = False,
    first: int | None = None,
    devices: int = 1,
) -> Schedule:
    """A table with its modes, in the order in which a pipeline adds them."""
    placement = placement_for(schedule, stages, processes, replicas)
    if devices > 1:
        of_places = [f"cuda:{(devices * stage) // stages}" for stage, _ in placement.places]
        placement = replace(placement, devices=of_places)
    table = build(schedule, stages, count * chunks, placement, recompute, steps=steps, group_size=chunks)
    table = with_offloads(table, frozenset(host))
    if visitors is not None:
        table = with_visits(table)
        if table.is_training:
            check_visits(table, are_trained=visitors == "all")
    if is_beside:
        table = updates_beside(table) or table
    return table if first is None else table.first(first)


def _name(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in values.items())


def _sizes(schedule: str, stages: int) -> Iterator[int]:
    """The numbers of processes of a pipeline that are tried for a number of stages."""
    if schedule in V_SHAPED:
        yield from (stages // 2,) if stages % 2 == 0 else ()
        return
    halved = stages // 2 if stages % 2 == 0 or schedule not in ("interleaved_1f1b", "breadth_first") else 1
    yield from sorted({stages, max(halved, 1), 1})


@cache
def _cases() -> dict[str, Make]:
    cases: dict[str, Make] = {}
    for values in _values():
        cases[_name(values)] = partial(_table, **values)
    cases |= _made()
    return cases


def _values() -> Iterator[dict[str, Any]]:
    """The arguments of `_table` of each case."""
    for schedule, stages, count in product(SYNCHRONOUS, (1, 2, 3, 4, 5, 8), (1, 2, 3, 4, 6, 8)):
        for processes, recompute in product(_sizes(schedule, stages), ("none", "stage")):
            yield _of(schedule, stages, count, processes, recompute=recompute)
    for schedule, stages, count in product((*SYNCHRONOUS, *FORWARD_ONLY), (1, 2, 3, 4), (1, 4, 5)):
        for size, times, recompute in product(_sizes(schedule, stages), (2, 3), ("none", "stage")):
            yield _of(schedule, stages, count, size * times, times, recompute)
    for schedule, replicas in product((*SYNCHRONOUS, *FORWARD_ONLY), ((2, 1), (1, 3), (2, 1, 1), (1, 2, 2), (3, 2, 1))):
        for count, recompute in product((2, 4, 6), ("none", "stage")):
            yield _of(schedule, len(replicas), count, sum(replicas), replicas, recompute)
    for schedule, stages, count, chunks in product(SYNCHRONOUS, (1, 2, 4), (1, 2, 4), (2, 3)):
        for size, times, recompute in product(_sizes(schedule, stages), (1, 2), ("none", "stage")):
            yield _of(schedule, stages, count, size * times, times, recompute, chunks=chunks)
    limits: tuple[tuple[int | None, ...], ...]
    for stages, limits in ((2, ((1, 1), (2, None), (3, 2))), (4, ((1, 2, 3, 4), (2,) * 4, (None, 1, None, 3)))):
        for schedule, count, limit in product(SYNCHRONOUS, (4, 7), limits):
            for size, chunks in product(_sizes(schedule, stages), (1, 2)):
                yield _of(schedule, stages, count, size, recompute=limit, chunks=chunks)
    yield from _of_modes()
    for schedule, stages, recompute in product(ASYNCHRONOUS, (1, 2, 3, 4, 6), ("none", "stage")):
        for steps, size in product(((1,) * 6, (2,) * 4, (4, 4, 4), (3, 2, 1)), sorted({stages, max(stages // 2, 1)})):
            yield _of(schedule, stages, sum(steps), size, recompute=recompute, steps=steps)
    for schedule, replicas in product(ASYNCHRONOUS, ((2, 2), (2, 1), (1, 2, 2), (3, 1, 1), (2, 2, 2))):
        for steps, recompute in product(((2, 2, 2), (4, 4, 1), (1, 1, 1)), ("none", "stage", (2,) * len(replicas))):
            yield _of(schedule, len(replicas), sum(steps), sum(replicas), replicas, recompute, steps=steps)


def _of_modes() -> Iterator[dict[str, Any]]:
    """Cases of offloaded graphs, visits, updates beside backwards, several devices, and first micro-batches."""
    for schedule, (stages, host), count in product(
        SYNCHRONOUS, ((2, (0, 1)), (4, (0, 1, 2, 3)), (4, (0, 2)), (8, tuple(range(8)))), (3, 6, 9)
    ):
        for size, chunks, times in product(_sizes(schedule, stages), (1, 2), (1, 2)):
            if chunks == times == 1 or (count == 6 and stages <= 4):
                yield _of(schedule, stages, count, size * times, times, chunks=chunks, host=host)
    for schedule, (stages, size), count, visitors in product(
        (*PLAIN, *V_SHAPED, *DEALT, "forward_only"),
        ((3, 1), (4, 1), (6, 2), (8, 2), (9, 3), (4, 4), (6, 3)),
        (1, 2, 4),
        ("frozen", "all"),
    ):
        if schedule in V_SHAPED and stages != 2 * size:
            continue
        for recompute, chunks, times in product(("none", "stage"), (1, 2), (1, 2)):
            if chunks == times == 1 or (count == 4 and recompute == "stage"):
                yield _of(schedule, stages, count, size * times, times, recompute, chunks=chunks, visitors=visitors)
    for stages, size, count in product((3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 4, 6)):
        if size <= stages:
            yield _of("round_robin", stages, count, size, recompute="stage", visitors="all", is_beside=True)
    for schedule, (stages, size, devices), count in product(
        (*PLAIN, *V_SHAPED, *DIVIDED), ((4, 1, 2), (4, 2, 2), (6, 1, 3), (8, 2, 4)), (2, 5)
    ):
        for recompute, visitors in product(("none", "stage"), (None, "frozen")):
            if size in _sizes(schedule, stages):
                yield _of(schedule, stages, count, size, recompute=recompute, devices=devices, visitors=visitors)
    for schedule, first in product(SYNCHRONOUS, (1, 3, 6)):
        size = 2 if schedule in V_SHAPED else 4
        yield _of(schedule, 4, 6, size, recompute="stage", first=first)


def _of(
    schedule: str,
    stages: int,
    count: int,
    processes: int,
    replicas: int | tuple[int, ...] = 1,
    recompute: str | tuple[int | None, ...] = "none",
    **modes: Any,
) -> dict[str, Any]:
    values: dict[str, Any] = {"schedule": schedule, "stages": stages, "count": count, "processes": processes}
    if replicas != 1:
        values["replicas"] = replicas
    plain = {"chunks": 1, "host": (), "visitors": None, "devices": 1}
    return (
        values | {"recompute": recompute} | {key: value for key, value in modes.items() if plain.get(key, ...) != value}
    )


def _made() -> dict[str, Make]:
    """Tables that are made for stages of unequal cost: by list scheduling, and by dealing."""
    cases: dict[str, Make] = {}
    for stages, processes, count in ((2, 2, 4), (4, 4, 6), (4, 2, 5), (8, 4, 8)):
        for most, effort, recomputes in product((1, 2, 4), (0, 2000), (False, True)):
            name = f"listed stages={stages} processes={processes} count={count} most={most} effort={effort}"
            make = partial(_listed, stages, processes, count, most, effort, recomputes=recomputes)
            cases[f"{name} recomputes={recomputes}"] = make
    for stages, workers, count in ((4, 2, 4), (6, 3, 6), (8, 3, 8), (9, 4, 12)):
        for most, rounds in product((None, 1, 2), (None, 1, 2)):
            make = partial(_dealt, stages, workers, count, most, rounds)
            cases[f"dealt stages={stages} workers={workers} count={count} most={most} rounds={rounds}"] = make
    return cases


def _listed(stages: int, processes: int, count: int, most: int, effort: int, *, recomputes: bool) -> Schedule:
    placement = Placement.spread(stages, processes)
    forward = [1.0 + (s % 3) / 4 for s in range(stages)]
    held = [1.0 + (s % 2) / 2 for s in range(stages)]
    work = Work(
        forward,
        [2 * f for f in forward],
        [f + 0.25 for f in forward],
        held,
        [h / 2 for h in held],
        [0.125] * (stages - 1),
        forward if recomputes else None,
        [h / 8 for h in held],
    )
    rooms = [most * sum(held[s] for s in placement.stages_of(process)) for process in range(processes)]
    orders = best_listed(placement, count, work, rooms, effort=effort).orders
    rows = [whole_backwards(order, process, placement) for process, order in enumerate(orders)]
    rows = [[*row, *(Action(UPDATE, s) for s in placement.stages_of(p))] for p, row in enumerate(rows)]
    return Schedule("listed", stages, count, placement, tuple(map(tuple, rows)))


def _dealt(stages: int, workers: int, count: int, most: int | None, rounds: int | None) -> Schedule:
    forward = [Fraction(2 + (3 * s) % 4, 2) for s in range(stages)]
    placement = Placement.shared(stages, workers).balanced([3 + (5 * s) % 7 for s in range(stages)])
    deal = deal_of(placement, count, forward, forward, [2 * f for f in forward], most, rounds)
    return dealt_table(placement, count, deal)


#: The keys of each mode, and of a base that every mode can be added to.
_BASE: dict[str, Any] = {"num_stages": 6, "num_micro_batches": 4, "schedule": "1f1b", "recompute": "stage"}
_MODES: dict[str, dict[str, Any]] = {
    "chunks": {"sequence_chunks": 2},
    "tapered chunks": {"sequence_chunks": 2, "chunk_taper": 0.5},
    "frozen weights visit": {"offload_weights": "frozen", "schedule": "breadth_first", "num_processes": 2},
    "all weights visit": {"offload_weights": "all", "schedule": "breadth_first", "num_processes": 2},
    "dealt stages": {"offload_weights": "all", "schedule": "round_robin", "num_processes": 3},
    "graphs on the host": {"recompute": "host"},
    "blocks recomputed": {"recompute": "block"},
    "teacher": {"teacher": True},
    "divided head": {"schedule": "vocab_1f1b"},
    "tensor parallelism": {"tensor_parallel": 2},
    "asynchrony": {"schedule": "pipedream"},
    "replicas": {"replicas": 2},
    "unequal replicas": {"replicas": [2, 1, 1, 1, 1, 2]},
    "zero": {"replicas": 2, "zero": 1},
    "a placement": {"placement": "0 1 2 2 1 0", "num_processes": 3},
    "narrow messages": {"boundary_dtype": "bfloat16"},
    "compiled blocks": {"torch_compile": True},
    "split backwards": {"schedule": "zb_h1"},
}


@cache
def _pairs() -> dict[str, Make]:
    """Each mode and each pair of modes, as keys of a decided pipeline: its table, or why they do not go together."""
    cases: dict[str, Make] = {}
    for mode in _MODES:
        cases[f"mode {mode}"] = partial(_table_of_keys, _MODES[mode])
    for one, other in combinations(_MODES, 2):
        first, second = _MODES[one], _MODES[other]
        if all(first[key] == second[key] for key in first.keys() & second.keys() - {"num_processes"}):
            keys = {**first, **second}
            if "num_processes" in keys and "replicas" in keys:
                own = keys["replicas"] if isinstance(keys["replicas"], int) else 1
                keys["num_processes"] *= own
            cases[f"modes {one} and {other}"] = partial(_table_of_keys, keys)
    return cases


def _table_of_keys(keys: dict[str, Any]) -> Schedule:
    own = {**_BASE, **keys}
    has_teacher = own.pop("teacher", False)
    settings = PipelineConfig(**own).decided(partition=[1] * own["num_stages"])
    if has_teacher:
        settings.check_beside("teacher")
    count, chunks = settings.num_micro_batches, settings.groups.size
    return table_of(settings, PlanInputs(needs_norm=False), count * chunks, chunks)
