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
after each, or with "U of 8" after every eighth. docs/benchmarks.md says what the other --paces are.

    python scripts/bench_emulated.py                                   about 40 minutes
    python scripts/bench_emulated.py --processes 8 --micro-batches 32 --steps 5 --json emulated.json
    python scripts/bench_emulated.py --paces mesh                      or memory, chunks, head, dealt: a minute or two
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from bench.emulation import Emulated, Step, emulate
from bench.memory_limits import OPTIMA, UNIT, Case, best_named, listed
from bench.report import Spread, table, write_json
from bench.runner import await_quiet, bench_parser, say

from hf_gpipe.schedule import DIVIDED_HEAD, placement_for
from hf_gpipe.schedule.round_robin import dealt_table

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

#: The settings of each table: see `Emulated`.
TABLES: tuple[dict[str, Any], ...] = (
    *({"schedule": name} for name in ("gpipe", "gpipe_fused", "1f1b", "zb_h1", "zb_h2")),
    *({"schedule": name, "stages_each": 2} for name in ("interleaved_1f1b", "breadth_first", "zb_v", "v_half")),
    {"schedule": "zb_h2", "steps": 20},
    *({"schedule": "pipedream"}, {"schedule": "pipedream_vertical"}, {"schedule": "pipedream_2bw", "step_size": 8}),
    *(
        {"schedule": name, "recompute": "stage", "recomputes_late": is_late}
        for name in ("gpipe", "1f1b")
        for is_late in (False, True)
    ),
)
#: One micro-batch after another: its time is known without measuring many of them.
NAIVE, NAIVE_MICRO_BATCHES = {"schedule": "naive"}, 8
#: "mesh": replicas whose gradients are reduced at once, and in so many seconds, at the pace "easy".
MESH: dict[str, Any] = {"processes": 4, "micro_batches": 32, "replicas": 2}
MESH_SCHEDULES, MESH_REDUCE_SECONDS = ("1f1b", "gpipe_fused", "gpipe"), 0.020


def settings_of(pace: Pace, processes: Sequence[int], micro_batches: Sequence[int]) -> list[Emulated]:
    """Every table for every K and M at one pace."""
    return [
        Emulated(processes=k, micro_batches=m, **case, **pace._asdict())
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
        Emulated(schedule=schedule, **values, **pace._asdict(), reduce_seconds=seconds)
        for schedule in MESH_SCHEDULES[: 1 if quick else None]
        for seconds in (0.0, MESH_REDUCE_SECONDS / (10 if quick else 1))
    ]


def chunk_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """One row of 16 chunks: the last takes four times as long as the first, as where most of the time is attention."""
    common = {"micro_batches": len(ROW), "chunk_shares": ROW, **pace._asdict()}
    tables = ({"schedule": "1f1b"}, {"schedule": "1f1b", "recompute": "stage"}, {"schedule": "zb_h1"})
    return [Emulated(processes=k, **table, **common) for k in ((2,) if quick else (4, 8)) for table in tables]


def head_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """A head that takes as long as there are stages: on the last stage, and divided over all."""
    count = 2 if quick else 4
    common = {"processes": count, "micro_batches": 4 if quick else 32, **pace._asdict()}
    on_last = {
        name: [seconds] * (count - 1) + [(1 + count) * seconds]
        for name, seconds in pace._asdict().items()
        if name != "boundary_bytes"
    }
    head = (pace.forward_seconds, pace.backward_seconds)
    return [
        Emulated(schedule="1f1b", **common | on_last),
        *(Emulated(schedule=name, **common, head_seconds=head) for name in DIVIDED_HEAD),
    ]


def dealt_settings(pace: Pace, *, quick: bool) -> list[Emulated]:
    """Dealt stages with copies of their weights and with updates; with a head of four stages, also interleaved."""
    count, each, micro_batches = (2, 2, 4) if quick else (4, 4, 32)
    stages = count * each
    common = {"processes": count, "stages_each": each, "micro_batches": micro_batches, "recompute": "stage"}
    common["boundary_bytes"] = pace.boundary_bytes
    heads = [1.0] * (stages - 1) + [5.0]
    # Of a process, of whose time each stage has its part.
    forward, backward = ([share * seconds for share in heads] for seconds in pace[:2])
    placement = placement_for("round_robin", stages, count)
    table = dealt_table(placement, micro_batches, forward, forward, backward)
    copies = pace.forward_seconds / each * 4
    plain = {"forward_seconds": pace.forward_seconds, "backward_seconds": pace.backward_seconds}
    on_last = {"forward_seconds": forward, "backward_seconds": backward}
    return [
        *(
            Emulated(schedule="round_robin", **common, **plain, copy_seconds=(copies, copies), **updates)
            for updates in ({}, {"update_seconds": 8 * copies}, {"update_seconds": 8 * copies, "updates_beside": True})
        ),
        Emulated(schedule="round_robin, head", **common, **on_last, table_text=str(table)),
        Emulated(schedule="interleaved_1f1b", **common, **on_last),
    ]


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
    **{"head": head_settings, "dealt": dealt_settings},
}


def speed_ups(setting: Emulated, steps: Sequence[Step]) -> Spread:
    return Spread.of(setting.one_process_seconds / step.seconds for step in steps)


def of_table(setting: Emulated, steps: Sequence[Step]) -> Spread:
    """The speed as a share of the table's."""
    return Spread.of(setting.predicted_seconds() / step.seconds for step in steps)


def name_of(setting: Emulated) -> str:
    """The schedule, and what it recomputes when."""
    parts = [setting.schedule]
    parts += [f"{setting.steps} steps"] * (setting.steps > 1) + [f"U of {setting.step_size}"] * (setting.step_size > 1)
    if isinstance(seconds := setting.reduce_seconds, float) and seconds:
        parts.append(f"G of {1000 * seconds:g} ms")
    if setting.update_seconds:
        parts.append(f"U of {1000 * setting.update_seconds:g} ms{' beside' * setting.updates_beside}")
    if setting.recompute != "none":
        parts.append(f"{setting.recompute} recomputed{' after the gradient' * setting.recomputes_late}")
    return ", ".join(parts)


def summary(settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
    rows = []
    for setting, own in zip(settings, steps, strict=True):
        speed_up = speed_ups(setting, own)
        # Milliseconds beyond the table, and their parts.
        late, sending = median(step.late_seconds for step in own), median(step.sending_seconds for step in own)
        lost = median(step.seconds for step in own) - setting.predicted_seconds()
        rows.append(
            [
                *(name_of(setting), setting.replicas, setting.processes, setting.micro_batches),
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
        parts = Spread.of((with_.seconds - without.seconds) / reduced.reduce_seconds for without, with_ in pairs)
        rows.append([reduced.schedule, parts.text()])
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
        settings = [setting for setting in settings if not options.schedules or setting.schedule in options.schedules]
        await_quiet(options)
        runs = emulate(settings, steps, say)
        header = f"{1000 * UNIT:g} ms a unit" if name == "memory" else pace.text()
        print(f"{header}\n\n{summary(settings, runs)}\n", flush=True)
        if name == "mesh":
            print(f"{longer(settings, runs)}\n", flush=True)
        for setting, own in zip(settings, runs, strict=True):
            figures = {field: [getattr(step, field) for step in own] for field in Step._fields[:4]}
            figures |= {"speed_up": speed_ups(setting, own), "bound": setting.bound}
            predicted = setting.predicted_seconds()
            results.append({"setting": asdict(setting), **figures, "predicted_seconds": predicted})
        write_json(options.json, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
