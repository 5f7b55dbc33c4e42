"""The executor's own overhead, at depths that this machine cannot compute: K = 2 to 16 processes that wait.

Each stage waits instead of computing; tables, executor and messages (gloo) are the real ones. Speed-up is over one
process that does the work of all without recomputation; the bound of a pipeline with one stage a process is
M K / (M + K - 1) (GPipe, arXiv 1811.06965, section 2.3). "of its table" compares with the simulation of the very table
that ran, which knows recomputation and interleaving: 1 means that neither executor nor messages cost anything.
"cores busy" is the CPU time of all processes over the step's time: near the number of cores, a step waits for the
machine. "lost" is what the step took beyond its table, in milliseconds; of that a process on average woke up "late",
was "sending" (handing messages over), or waited for messages on their way ("travel", the rest). "recomputed after
the gradient" is not what the tables do; it shows what recomputing before it arrives gains.

"mesh" is D = 2 pipelines of K = 4, at the pace "easy", whose replicas reduce their gradients: at once, and in 20 ms on
an emulated link, in buckets of which the first leave inside of the last backward.

"20 steps" of zb_h2 run one after another: a process that is done with a step begins the next one, as where no update
waits for the gradients of all stages. Their seconds are those of all steps.

pipedream, pipedream_vertical and pipedream_2bw run a window: M micro-batches without a flush, with an update after
each, or with "U of 8" after every eighth. The latter compares with 1f1b at M = 8, which empties the pipeline at each
update.

    python scripts/bench_emulated.py                                   about 40 minutes
    python scripts/bench_emulated.py --processes 8 --micro-batches 32 --steps 5 --json emulated.json
    python scripts/bench_emulated.py --paces mesh                      a minute
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import machine
from bench.emulation import Emulated, Step, emulate
from bench.report import Spread, table, write_json

from hf_gpipe.schedule import ASYNCHRONOUS_SCHEDULES, SPLIT_SCHEDULES

KIBIBYTE = 1024


@dataclass(frozen=True)
class Pace:
    """How long a stage's actions take and what crosses a boundary, for one micro-batch."""

    forward_seconds: float
    backward_seconds: float
    boundary_bytes: int

    def text(self) -> str:
        times = f"{self.forward_seconds * 1000:g}/{self.backward_seconds * 1000:g} ms"
        return f"forward/backward {times}, boundary {self.boundary_bytes // KIBIBYTE} KiB"


EASY = Pace(0.020, 0.040, 64 * KIBIBYTE)
HARD = Pace(0.005, 0.010, 1024 * KIBIBYTE)
PACES = {"easy": EASY, "hard": HARD}
MESH = "mesh"
QUICK = Pace(0.001, 0.002, 64 * KIBIBYTE)

#: The settings of each table: see `Emulated`.
TABLES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe"},
    {"schedule": "gpipe_fused"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved_1f1b", "stages_each": 2},
    {"schedule": "zb_h1"},
    {"schedule": "zb_h2"},
    {"schedule": "zb_h2", "steps": 20},
    {"schedule": "zb_v", "stages_each": 2},
    {"schedule": "v_half", "stages_each": 2},
    {"schedule": "pipedream"},
    {"schedule": "pipedream_vertical"},
    {"schedule": "pipedream_2bw", "step_size": 8},
    {"schedule": "gpipe", "recompute": "stage"},
    {"schedule": "gpipe", "recompute": "stage", "recomputes_late": True},
    {"schedule": "1f1b", "recompute": "stage"},
    {"schedule": "1f1b", "recompute": "stage", "recomputes_late": True},
)
#: One micro-batch after another: its time is known without measuring many of them.
NAIVE: dict[str, Any] = {"schedule": "naive"}
NAIVE_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Mesh:
    """Replicas, whose gradients are reduced at once and in `reduce_seconds`, and the targets for them.

    Attributes:
        replicas: D.
        processes: K.
        of_table: the least share of the table's speed.
        longer: the most by which a step is longer with the reduction, as a share of `reduce_seconds`.
    """

    replicas: int
    processes: int
    micro_batches: int
    reduce_seconds: float
    of_table: float = 0.95
    longer: float = 0.3
    schedules: tuple[str, ...] = ("1f1b", "gpipe_fused", "gpipe")

    def settings(self, pace: Pace) -> list[Emulated]:
        """Of each schedule without and with the reduction's time."""
        return [
            Emulated(
                schedule,
                self.processes,
                self.micro_batches,
                **asdict(pace),
                replicas=self.replicas,
                reduce_seconds=seconds,
            )
            for schedule in self.schedules
            for seconds in (0.0, self.reduce_seconds)
        ]

    def verdicts(self, settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
        """Both targets, for each schedule."""
        rows = []
        for i in range(0, len(settings), 2):
            without, reduced = ([one.seconds for one in own] for own in steps[i : i + 2])
            of_table = Spread.of(settings[i + 1].predicted_seconds() / seconds for seconds in reduced)
            longer = Spread.of((b - a) / self.reduce_seconds for a, b in zip(without, reduced, strict=True))
            is_reached = of_table.median >= self.of_table and longer.median <= self.longer
            reached = "yes" if is_reached else "no"
            rows.append(
                [settings[i].schedule, of_table.text(3), f"{self.of_table}", longer.text(), f"{self.longer}", reached]
            )
        return table(["schedule", "of its table", "at least", "longer by, in G", "at most", "reached"], rows)


REPLICATED = Mesh(replicas=2, processes=4, micro_batches=32, reduce_seconds=0.020)
QUICK_REPLICATED = Mesh(2, 2, 4, 0.002, schedules=("1f1b",))


@dataclass(frozen=True)
class Target:
    """The target at a pace without recomputation.

    Attributes:
        schedule: None: every one with one stage per process and whole backwards.
        steps: that run one after another.
    """

    processes: int
    micro_batches: int
    speed_up: float
    schedule: str | None = None
    steps: int = 1

    def text(self) -> str:
        return f"K = {self.processes}, M = {self.micro_batches}: at least {self.speed_up:.2f}"

    def concerns(self, setting: Emulated) -> bool:
        found = (setting.processes, setting.micro_batches, setting.steps, setting.recompute)
        if found != (self.processes, self.micro_batches, self.steps, "none"):
            return False
        if self.schedule is None:
            others = (*SPLIT_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
            return setting.stages_each == 1 and setting.schedule not in others
        return setting.schedule == self.schedule


TARGETS = (
    Target(8, 32, 6.4),
    Target(16, 32, 0.95 * 32 * 16 / 47),
    Target(8, 32, 7.1, "zb_h1"),
    Target(8, 32, 7.4, "zb_v"),
    Target(8, 32, 7.7, "zb_h2", steps=20),
    Target(8, 32, 0.97 * 32 * 8 / 39, "pipedream"),
    # 1.4 times what 1f1b can reach with 8 micro-batches per update.
    Target(8, 32, 1.4 * 8 * 8 / 15, "pipedream_2bw"),
)


def settings_of(pace: Pace, processes: Sequence[int], micro_batches: Sequence[int]) -> list[Emulated]:
    """Every table for every K and M at one pace."""
    return [
        Emulated(processes=k, micro_batches=m, **one, **asdict(pace))
        for k in processes
        for m in micro_batches
        for one in (*TABLES, *((NAIVE,) if m <= NAIVE_MICRO_BATCHES else ()))
        # Fewer micro-batches leave a bubble between the steps too.
        if ("steps" not in one or m >= 2 * k) and m % one.get("step_size", 1) == 0
    ]


def speed_ups(setting: Emulated, steps: Sequence[Step]) -> Spread:
    return Spread.of(setting.one_process_seconds / one.seconds for one in steps)


def name_of(setting: Emulated) -> str:
    """The schedule, and what it recomputes when."""
    late = " after the gradient" if setting.recomputes_late else ""
    reduced = (
        f", G of {1000 * seconds:g} ms" if isinstance(seconds := setting.reduce_seconds, float) and seconds else ""
    )
    steps = f", {setting.steps} steps" if setting.steps > 1 else ""
    steps += f", U of {setting.step_size}" if setting.step_size > 1 else ""
    return (
        setting.schedule
        + steps
        + reduced
        + ("" if setting.recompute == "none" else f", {setting.recompute} recomputed{late}")
    )


def summary(settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
    rows = []
    for setting, own in zip(settings, steps, strict=True):
        speed_up = speed_ups(setting, own)
        rows.append(
            [
                name_of(setting),
                f"{setting.replicas}",
                f"{setting.processes}",
                f"{setting.micro_batches}",
                Spread.of(one.seconds for one in own).text(3),
                speed_up.text(),
                f"{setting.bound:.2f}",
                f"{speed_up.median / setting.bound:.3f}",
                Spread.of(setting.predicted_seconds() / one.seconds for one in own).text(3),
                f"{median(one.cpu_seconds / one.seconds for one in own):.2f}",
                *_losses(setting, own),
            ]
        )
    header = [
        "schedule",
        "D",
        "K",
        "M",
        "seconds a step",
        "speed-up",
        "bound",
        "of bound",
        "of its table",
        "cores busy",
    ]
    return table([*header, "lost ms", "late", "sending", "travel"], rows)


def _losses(setting: Emulated, steps: Sequence[Step]) -> list[str]:
    """Milliseconds beyond the table, and their parts."""
    late, sending = median(one.late_seconds for one in steps), median(one.sending_seconds for one in steps)
    lost = median(one.seconds for one in steps) - setting.predicted_seconds()
    return [f"{1000 * seconds:.1f}" for seconds in (lost, late, sending, lost - late - sending)]


def verdicts(settings: Sequence[Emulated], steps: Sequence[Sequence[Step]]) -> str:
    """The targets, for each table that they are about."""
    rows = []
    for target in TARGETS:
        for setting, own in zip(settings, steps, strict=True):
            if target.concerns(setting):
                speed_up = speed_ups(setting, own)
                reached = "yes" if speed_up.median >= target.speed_up else "no"
                rows.append([target.text(), setting.schedule, speed_up.text(), reached])
    return table(["target", "schedule", "speed-up", "reached"], rows) if rows else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8, 16], metavar="K")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 32], metavar="M")
    parser.add_argument("--schedules", nargs="+", help="these alone")
    parser.add_argument("--paces", nargs="+", choices=[*PACES, MESH], default=[*PACES, MESH])
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each table")
    parser.add_argument("--quiet", type=float, default=120, help="seconds to wait for a quiet machine before each pace")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="2 processes, milliseconds, to see that everything runs")
    arguments = parser.parse_args(argv)
    processes, micro_batches, steps = arguments.processes, arguments.micro_batches, arguments.steps
    if arguments.quick:
        processes, micro_batches, steps = [2], [4], 1
    results = []
    for name in ["", MESH] if arguments.quick else arguments.paces:
        pace = QUICK if arguments.quick else PACES.get(name, EASY)
        mesh = QUICK_REPLICATED if arguments.quick else REPLICATED
        settings = mesh.settings(pace) if name == MESH else settings_of(pace, processes, micro_batches)
        settings = [one for one in settings if not arguments.schedules or one.schedule in arguments.schedules]
        if not arguments.quick and not machine.wait_until_quiet(arguments.quiet):
            print("the machine is not quiet", file=sys.stderr)
        found = emulate(settings, steps, lambda text: print(text, file=sys.stderr, flush=True))
        print(f"{pace.text()}\n\n{summary(settings, found)}\n", flush=True)
        if name == MESH:
            print(f"{mesh.verdicts(settings, found)}\n", flush=True)
        elif pace == EASY and (text := verdicts(settings, found)):
            print(f"{text}\n", flush=True)
        for setting, own in zip(settings, found, strict=True):
            results.append(
                {
                    "setting": asdict(setting),
                    **{name: [getattr(one, name) for one in own] for name in Step._fields},
                    "speed_up": asdict(speed_ups(setting, own)),
                    "bound": setting.bound,
                    "predicted_seconds": setting.predicted_seconds(),
                }
            )
        write_json(arguments.json, {"environment": machine.environment(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
