"""The executor's own overhead, at depths that this machine cannot compute: K = 2 to 16 processes that wait.

Each stage waits instead of computing; tables, executor and messages (gloo) are the real ones. Speed-up is over one
process that does the work of all without recomputation; the bound of a pipeline with one stage a process is
M K / (M + K - 1) (GPipe, arXiv 1811.06965, section 2.3). "of its table" compares with the simulation of the very table
that ran, which knows recomputation and interleaving: 1 means that neither executor nor messages cost anything.
"cores busy" is the CPU time of all processes over the step's time: near the number of cores, a step waits for the
machine. "lost" is what the step took beyond its table, in milliseconds; of that a process on average woke up "late",
was "sending" (handing messages over), or waited for messages on their way ("travel", the rest). "recomputed after
the gradient" is not what the tables do; it shows what recomputing before it arrives gains.

Of several "steps" a process that is done with one begins the next, as where no update waits for the gradients of all
stages. pipedream, pipedream_vertical and pipedream_2bw run a window: M micro-batches without a flush, with an update
after each, or with "U of 8" after every eighth. docs/benchmarks_details.md says what the other --paces are.

    python scripts/bench_emulated.py                                   about 40 minutes
    python scripts/bench_emulated.py --processes 8 --micro-batches 32 --steps 5 --json emulated.json
    python scripts/bench_emulated.py --paces mesh                      or memory, chunks, head, dealt, visits: minutes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from bench.emulation import Emulated, Step, emulate
from bench.memory_limits import OPTIMA, UNIT, Case, best_named, listed
from bench.report import Spread, table, write_json
from bench.runner import await_quiet, bench_parser, say

from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD, LOGITS, LOGITS_GRADIENT
from hf_gpipe.modes.visits.late_updates import LATE_UPDATE, with_late_updates
from hf_gpipe.modes.visits.round_robin import deal_of, dealt_table
from hf_gpipe.modes.visits.table import stages_that_stay, with_visits
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.schedule import Costs, Schedule, build, has_windows, placement_for
from hf_gpipe.schedule.kinds import RECOMPUTE
from hf_gpipe.schedule.updates import updates_beside

KIBIBYTE = 1024


class Pace(NamedTuple):
    """How long a stage's actions take and what crosses a boundary, for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int

    def text(self) -> str:
        times = f"{self.forward_seconds * 1000:g}/{self.backward_seconds * 1000:g} ms"
        return f"forward/backward {times}, boundary {self.boundary_bytes // KIBIBYTE} KiB"


EASY, HARD = Pace(0.020, 0.040, 64 * KIBIBYTE), Pace(0.005, 0.010, 1024 * KIBIBYTE)
PACES = {"easy": EASY, "hard": HARD}
#: One row: the time of each chunk, over their mean.
ROW = tuple((1 + 3 * chunk / 15) / 2.5 for chunk in range(16))
QUICK = Pace(0.001, 0.002, 64 * KIBIBYTE)

#: What differs in each table from one stage a process without recomputation: see `emulated`.
TABLES: tuple[dict[str, Any], ...] = (
    *({"schedule": name} for name in ("gpipe", "gpipe_fused", "1f1b", "zb_h1", "zb_h2")),
    *({"schedule": name, "stages_each": 2} for name in ("interleaved_1f1b", "breadth_first", "zb_v", "v_half")),
    {"schedule": "zb_h2", "steps": 20},
    *({"schedule": "pipedream"}, {"schedule": "pipedream_vertical"}, {"schedule": "pipedream_2bw", "step_size": 8}),
    *(
        {"schedule": name, "recompute": "stage", "is_late": is_late}
        for name in ("gpipe", "1f1b")
        for is_late in (False, True)
    ),
)
#: One micro-batch after another: its time is known without measuring many of them.
NAIVE, NAIVE_MICRO_BATCHES = {"schedule": "naive"}, 8
#: "mesh": replicas whose gradients are reduced at once, and in so many seconds, at the pace "easy".
MESH: dict[str, Any] = {"processes": 4, "micro_batches": 32, "replicas": 2}
MESH_SCHEDULES, MESH_REDUCE_SECONDS = ("1f1b", "gpipe_fused", "gpipe"), 0.020


def emulated(
    schedule: str,
    processes: int,
    micro_batches: int,
    pace: Pace,
    *,
    stages_each: int = 1,
    recompute: str = "none",
    is_late: bool = False,
    replicas: int = 1,
    steps: int = 1,
    step_size: int = 1,
    row: Sequence[float] = (1.0,),
    is_updated_beside: bool = False,
    stay: int | None = None,
    table: Schedule | None = None,
    **costs: Any,
) -> Emulated:
    """One table at a pace, whose seconds are those of a process; `costs` replaces what its stages take.

    With `is_late` a stage waits for the gradient before it recomputes, as torch.utils.checkpoint does. Of an
    asynchronous schedule `step_size` is the number of micro-batches of each update. `row` has the time of each chunk.
    `stay` is the number of stages of a process that stay on its device while the others visit; None: all stay.
    """
    num_stages = processes * stages_each
    if table is None:
        updates = [step_size] * (micro_batches // step_size) if has_windows(schedule) else None
        placement = placement_for(schedule, num_stages, processes * replicas, replicas)
        table = build(schedule, num_stages, micro_batches, placement, recompute, steps=updates, group_size=len(row))
    table = (updates_beside(table) if is_updated_beside else None) or table
    if stay is not None:
        table = with_visits(table, stages_that_stay(table.placement, stay))
    forward, backward = ([share * seconds / stages_each for share in row] for seconds in pace[:2])
    taken = {"forward_seconds": [forward] * num_stages, "backward_seconds": [backward] * num_stages} | costs
    late_seconds = 0.0
    if is_late:  # the tables recompute all micro-batches of a stage, or none
        again = [forward[0] * (table.num_actions(stage, RECOMPUTE) > 0) for stage in range(num_stages)]
        taken["backward_seconds"], late_seconds = [backward[0] + own for own in again], micro_batches * sum(again)
        actions = (tuple(action for action in own if action.kind != RECOMPUTE) for own in table.actions)
        table = replace(table, actions=tuple(actions))
    parts = [schedule, *[f"{steps} steps"] * (steps > 1), *[f"U of {step_size}"] * (step_size > 1)]
    if reduction := costs.get("reduce_seconds"):
        parts.append(f"G of {1000 * reduction:g} ms")
    if update := costs.get("update_seconds"):
        parts.append(f"U of {1000 * update:g} ms{' beside' * is_updated_beside}")
    parts += [f"{recompute} recomputed{' after the gradient' * is_late}"] * (recompute != "none")
    return Emulated(table, Costs(**taken), pace.boundary_bytes, ", ".join(parts), steps, late_seconds)


def settings_of(pace: Pace, processes: Sequence[int], micro_batches: Sequence[int]) -> list[Emulated]:
    """Every table for every K and M at one pace."""
    return [
        emulated(processes=k, micro_batches=m, pace=pace, **case)
        for k in processes
        for m in micro_batches
        for case in (*TABLES, *((NAIVE,) if m <= NAIVE_MICRO_BATCHES else ()))
        # Fewer micro-batches leave a bubble between the steps too.
        if ("steps" not in case or m >= 2 * k) and m % case.get("step_size", 1) == 0
    ]


def mesh_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """Of each schedule without and with the time of reductions, which leave in buckets inside of the last backward."""
    values = MESH | ({"processes": 2, "micro_batches": 4} if quick else {})
    return [
        emulated(schedule, pace=pace, **values, reduce_seconds=seconds)
        for schedule in MESH_SCHEDULES[: 1 if quick else None]
        for seconds in (0.0, MESH_REDUCE_SECONDS / (10 if quick else 1))
    ]


def chunk_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """One row of 16 chunks: the last takes four times as long as the first, as where most of the time is attention."""
    tables = ({"schedule": "1f1b"}, {"schedule": "1f1b", "recompute": "stage"}, {"schedule": "zb_h1"})
    counts = (2,) if quick else (4, 8)
    return [emulated(processes=k, micro_batches=16, pace=pace, row=ROW, **case) for k in counts for case in tables]


def head_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """A head that takes as long as there are stages: on the last stage, and divided over all."""
    count, micro_batches = (2, 4) if quick else (4, 32)
    forward, backward = ([seconds] * (count - 1) + [(1 + count) * seconds] for seconds in pace[:2])
    heads = {LOGITS: [pace.forward_seconds] * count, LOGITS_GRADIENT: [pace.backward_seconds] * count}
    return [
        emulated("1f1b", count, micro_batches, pace, forward_seconds=forward, backward_seconds=backward),
        *(emulated(name, count, micro_batches, pace, others=heads) for name in DIVIDED_HEAD),
    ]


def dealt_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """Dealt stages with copies of their weights and with updates; with a head of four stages, also interleaved."""
    count, each, micro_batches = (2, 2, 4) if quick else (4, 4, 32)
    stages = count * each
    common: dict[str, Any] = {"processes": count, "micro_batches": micro_batches, "pace": pace}
    common |= {"stages_each": each, "recompute": "stage"}
    copies = pace.forward_seconds / each * 4
    visiting = {"schedule": "round_robin", "others": {LOAD: copies, DROP: copies}}
    forward, backward = ([seconds / each] * (stages - 1) + [5 * seconds / each] for seconds in pace[:2])
    headed = common | {"forward_seconds": forward, "backward_seconds": backward}
    size = placement_for("round_robin", stages, count), micro_batches
    table = dealt_table(*size, deal_of(*size, forward, forward, backward))
    return [
        emulated(**common, **visiting),
        *(
            emulated(**common, **visiting, update_seconds=8 * copies, is_updated_beside=beside)
            for beside in (False, True)
        ),
        emulated("round_robin, head", **headed, table=table),
        emulated("interleaved_1f1b", **headed),
    ]


def visits_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """Stages whose weights visit: all of them, all but two, and experts alone, which are a part of the bytes."""
    count, each, micro_batches = (2, 4, 2) if quick else (2, 6, 4)
    common: dict[str, Any] = {"processes": count, "micro_batches": micro_batches, "pace": pace}
    common |= {"stages_each": each, "recompute": "stage"}
    # Longer than a stage's forwards, and shorter than its backwards.
    copies = 1.5 * micro_batches * pace.forward_seconds / each
    settings = [
        replace(emulated("breadth_first", **common, stay=stay, others={LOAD: own, DROP: 0.0}), name=name)
        for name, stay, own in (
            ("all visit", 0, copies),
            (f"{each // 3} of {each} stay", each // 3, copies),
            ("experts visit, half of the bytes", 0, copies / 2),
        )
    ]
    # The update of a stage takes twice as long as its forwards.
    update, costs = 4 / 3 * copies, {LOAD: copies, DROP: copies}
    last = emulated("breadth_first", **common, stay=0, others=costs, update_seconds=update)
    late = emulated("breadth_first", **common, stay=0, others=costs | {LATE_UPDATE: update})
    late = replace(late, table=with_late_updates(late.table))
    return [*settings, replace(last, name="trained, updates last"), replace(late, name="trained, updates late")]


def memory_settings(_: Pace, *, quick: bool) -> list[Emulated]:
    """Print the tables of all limits of memory; returns the best named and the best of all with K = 4 and 8."""
    cases = {Case(head, count, 2 * count, graphs): optimum for (head, count, graphs), optimum in OPTIMA.items()}
    sizes = [(8, 16, graphs) for graphs in (1.5, 2, 3)] + [(16, 64, graphs) for graphs in (2, 4, 8)]
    large = {Case(head, *size): None for head in ("equal", "big head") for size in sizes}
    settings, rows = [], []
    for case, optimum in [*(cases | large).items()][: 1 if quick else None]:
        named_seconds, name, named = best_named(case)
        straight, in_v = listed(case), listed(case, 2)
        listed_seconds, listed_table = min((straight[:2], in_v[:2]), key=lambda entry: entry[0])
        best = min(named_seconds, listed_seconds)
        over = [f"{(seconds / optimum - 1):+.1%}" if optimum else "" for seconds in (named_seconds, straight[0], best)]
        rows.append(
            [
                f"{case.head}, K = {case.processes}, M = {case.micro_batches}, {case.graphs:g} graphs",
                *(optimum or "", f"{named_seconds:.0f} ({name})", over[0], f"{straight[0]:.0f}", over[1]),
                *(f"{in_v[0]:.0f}", f"{best:.0f}", over[2], f"{named_seconds / best - 1:.1%}"),
                *(f"{straight[2]:.1f}", f"{in_v[2]:.1f}"),
            ]
        )
        if case.processes in (4, 8) or quick:
            settings.append(case.emulated(f"{case.head}, {case.graphs:g} graphs: {name}", named))
            if listed_seconds < named_seconds:
                settings.append(case.emulated(f"{case.head}, {case.graphs:g} graphs: listed", listed_table))
    header = ["limit", "optimum", "named", "over it", "listed", "over it", "in a V", "best", "over it", "gain"]
    print(f"{table([*header, 'CPU seconds', 'in a V'], rows)}\n", flush=True)
    return settings


#: The settings of what is not every table at a pace.
OTHERS = {
    **{"mesh": mesh_settings, "memory": memory_settings, "chunks": chunk_settings},
    **{"head": head_settings, "dealt": dealt_settings, "visits": visits_settings},
}


def speed_ups(setting: Emulated, steps: Sequence[Step]) -> Spread:
    return Spread.of(setting.one_process_seconds / step.seconds for step in steps)


def of_table(setting: Emulated, steps: Sequence[Step]) -> Spread:
    """The speed as a share of the table's."""
    return Spread.of(setting.predicted_seconds / step.seconds for step in steps)


def summary(settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
    rows = []
    for setting, own in zip(settings, steps, strict=True):
        speed_up = speed_ups(setting, own)
        # Milliseconds beyond the table, and their parts.
        late, sending = median(step.late_seconds for step in own), median(step.sending_seconds for step in own)
        lost = median(step.seconds for step in own) - setting.predicted_seconds
        rows.append(
            [
                *(setting.name, setting.replicas, setting.processes, setting.table.num_micro_batches),
                *(Spread.of(step.seconds for step in own).text(3), speed_up.text(), f"{setting.bound:.2f}"),
                *(f"{speed_up.median / setting.bound:.3f}", of_table(setting, own).text(3)),
                f"{median(step.cpu_seconds / step.seconds for step in own):.2f}",
                *(f"{1000 * seconds:.1f}" for seconds in (lost, late, sending, lost - late - sending)),
            ]
        )
    header = ["schedule", "D", "K", "M", "seconds a step", "speed-up", "bound", "of bound", "of its table"]
    return table([*header, "cores busy", "lost ms", "late", "sending", "travel"], rows)


def longer(settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
    """By how much a reduction makes a step longer, for each schedule of the mesh."""
    rows = []
    for i in range(0, len(settings), 2):
        pairs, reduced = zip(steps[i], steps[i + 1], strict=True), settings[i + 1]
        seconds = reduced.reduce_seconds[0]
        parts = Spread.of((with_.seconds - without.seconds) / seconds for without, with_ in pairs)
        rows.append([reduced.name, parts.text()])
    return table(["schedule", "longer by, in G"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, steps=5)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8, 16], metavar="K")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 32], metavar="M")
    parser.add_argument("--schedules", nargs="+", help="these alone")
    parser.add_argument("--paces", nargs="+", choices=[*PACES, *OTHERS], default=[*PACES, *OTHERS])
    options = parser.parse_args(argv)
    quick = options.quick
    processes, micro_batches, steps = options.processes, options.micro_batches, options.steps
    if quick:
        processes, micro_batches, steps = [2], [4], 1
    results = []
    for name in ["", *OTHERS] if quick else options.paces:
        pace = QUICK if quick else PACES.get(name, EASY)
        others = OTHERS.get(name)
        settings = others(pace, quick=quick) if others else settings_of(pace, processes, micro_batches)
        wanted = options.schedules
        settings = [setting for setting in settings if not wanted or setting.name.split(",")[0] in wanted]
        await_quiet(options)
        runs = emulate(settings, steps, say)
        header = f"{1000 * UNIT:g} ms a unit" if name == "memory" else pace.text()
        print(f"{header}\n\n{summary(settings, runs)}\n", flush=True)
        if name == "mesh":
            print(f"{longer(settings, runs)}\n", flush=True)
        for setting, own in zip(settings, runs, strict=True):
            figures = {field: [getattr(step, field) for step in own] for field in Step._fields[:4]}
            figures |= {"speed_up": speed_ups(setting, own), "bound": setting.bound}
            predicted = setting.predicted_seconds
            told = {"name": setting.name, "K": setting.processes, "M": setting.table.num_micro_batches}
            told |= {"replicas": setting.replicas, "reduce_seconds": setting.reduce_seconds[0]}
            results.append({"setting": told, **figures, "predicted_seconds": predicted})
        write_json(options.json, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
