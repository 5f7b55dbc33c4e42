"""Tables under a limit of memory, trained: the best named one beside the one that `schedule: auto` makes.

    python scripts/bench_tables.py            a llama with a large head, three limits, about 6 minutes
    python scripts/bench_tables.py --quick    a tiny one: does the script work?

Two processes of one thread each hold a stage each. A limit leaves each process room for so many of its graphs beside
what it holds all the time. Both plans are made from the seconds of the layers, measured in both processes at once, and
train in turn; peaks are those of the resident memory, as in validate_planner.py. The same on processes that wait, with
more of them, is `bench_emulated.py --paces memory`. Run it while the machine does nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.models import llama
from bench.planned import CPU, Case, planned, profile, tiny
from bench.processes import run_job
from bench.report import paired, table, write_json
from bench.runner import bench_parser, take_turns
from validate_planner import RETURN_FREED, peak, train

from hf_gpipe.errors import PartitionError
from hf_gpipe.planner.costs.measure import this_machine
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import allowed_plans, best_plan, can_run
from hf_gpipe.planner.search.listed import with_table
from hf_gpipe.settings.pipeline import PipelineConfig

#: Graphs that a process has room for.
GRAPHS = (1.5, 2.0, 3.0)
HEADER = ["graphs", "named", "made", "predicted s", "gain", "measured s", "gain", "peaks, MiB: named", "made"]


class Pair(NamedTuple):
    """The best plan of the named schedules under a limit, and the best of all."""

    named: Plan
    made: Plan


def limits(planner: Planner, free: PipelineConfig, graphs: float) -> tuple[int, ...]:
    """For each process the bytes that it needs with so many graphs: under `naive` it has one at a time."""
    plan = best_plan(planner, free.replace(num_stages=2, schedule="naive", recompute="none"))
    return tuple(
        int(process.memory.total + (graphs - 1) * plan.layout.sums.graph_bytes(stage))
        for process, stage in zip(plan.processes, plan.layout.stages, strict=True)
    )


def pair(plain: Plan, graphs: float) -> Pair:
    """The plans for as many micro-batches as one has. A named schedule may have two stages a process."""
    count = plain.settings.num_micro_batches
    free = PipelineConfig(num_processes=2).with_auto(2).replace(replicas=1, num_micro_batches=count)
    planner = plain.planner.within(limits(plain.planner, free, graphs))
    straight = free.replace(num_stages=2)
    plans = [*filter(can_run, allowed_plans(planner, straight))]
    made = with_table(min(plans, key=attrgetter("sort_key")), straight)
    with suppress(PartitionError):  # half of a stage may need more than half of the memory
        plans += filter(can_run, allowed_plans(planner, free.replace(num_stages=4)))
    named = min(plans, key=attrgetter("sort_key"))
    return Pair(named, min(named, made, key=attrgetter("sort_key")))


def case_of(plan: Plan, case: Case, folder: Path) -> Case:
    """The case that trains by a plan. Its table is a file."""
    settings, schedule = plan.settings, plan.settings.schedule
    if schedule in plan.planner.inputs.tables:
        path = folder / f"{len([*folder.iterdir()])}.txt"
        path.write_text(plan.timeline.schedule.text())
        schedule = str(path)
    others = {"partition": settings.partition}
    recompute = settings.recompute
    return replace(case, num_stages=settings.num_stages, schedule=schedule, recompute=recompute, others=others)


def text_of(plan: Plan) -> str:
    settings = plan.settings
    return f"{settings.schedule}, {settings.recompute}, {'+'.join(map(str, settings.partition))}"


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    options = bench_parser(__doc__, steps=4, reps=3).parse_args(argv)
    config = llama(512, 6, 24000, 1408, heads=8, pad_token_id=0)
    case = Case("llama", config, 8, 128, 128, 2, 2, 8, "gpipe", "none")
    case = replace(tiny(case), rows=8) if options.quick else case
    job = partial(run_job, num_processes=2, fork=options.quick, timeout_seconds=900)
    measured = job(profile, (case,))
    plain = planned(measured, case, replace(this_machine(CPU), reserved_share=0.0, reserved_working_share=0.0))
    rows = []
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-tables-") as folder:
        for graphs in GRAPHS[: 1 if options.quick else None]:
            plans = pair(plain, graphs)
            cases = {name: case_of(plan, case, Path(folder)) for name, plan in plans._asdict().items()}
            runs = take_turns({name: partial(seconds, job, own, options.steps) for name, own in cases.items()}, options)
            peaks = [job(peak, (own,), variables=RETURN_FREED) for own in cases.values()]
            times = {name: median(own) for name, own in runs.items()}
            rows.append(
                [
                    *(f"{graphs:g}", text_of(plans.named), text_of(plans.made)),
                    f"{plans.named.step_seconds:.3f} / {plans.made.step_seconds:.3f}",
                    f"{plans.named.step_seconds / plans.made.step_seconds:.3f}",
                    *(f"{times['named']:.3f} / {times['made']:.3f}", paired(runs["named"], runs["made"]).text(3)),
                    *(" and ".join(f"{size / 2**20:.0f}" for size in own) for own in peaks),
                ]
            )
            print(table(HEADER, rows[-1:]), flush=True)
    print(table(HEADER, rows))
    write_json(options.json, rows=rows)
    return 0


def seconds(job: Callable[..., list[Any]], case: Case, num_steps: int) -> float:
    """The median step of a case, each as long as its slower process."""
    trained = job(train, (case, num_steps))
    return median(max(times) for times in zip(*(times for _, times in trained), strict=True))


if __name__ == "__main__":
    sys.exit(main())
