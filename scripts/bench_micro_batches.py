"""Throughput over M in two processes, beside one process and "twin", two at once with half of the rows each.

    python scripts/bench_micro_batches.py llama [--reps 5]                     about 25 minutes
    python scripts/bench_micro_batches.py resnet --micro-batches 8             about 10 minutes
    python scripts/bench_micro_batches.py transformer --micro-batches 32 --partition 8 7

"single" is the plain model, which adds up M micro-batches. "twin" shares nothing: it is the most that two cores of the
machine can do. A step includes the update, and nothing is recomputed.

The llama's micro-batch has one size throughout, so the mini-batch grows with M, as in GPipe's Table 2 (arXiv
1811.06965). K = 2, 4 and 8 are emulated too: a model of fixed size in K stages that wait instead of computing, with
throughput normalised to K = 2, M = 1. ResNet-50 and a GPT-2 are those of examples/three_strategies.ipynb, with a
mini-batch of 128 rows; ours with M = 1 is naive model parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bench.contenders import Options
from bench.emulation import Emulated, emulate
from bench.measure import measure
from bench.report import Spread, paired, table, write_json
from bench.runner import bench_parser, take_turns
from bench.settings import Case
from bench.work import Gpt2Work, ResNetWork, Work

from hf_gpipe.schedule import Costs, build

PROCESSES = (2, 4, 8)
#: The paper's Transformer-48 by M, for each K. Its cells of M = 4 exceed the bound: the batch size was adjusted there.
PAPER = {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}
#: Of the whole emulated model for one micro-batch, and what crosses a boundary.
FORWARD_SECONDS, BACKWARD_SECONDS, BOUNDARY_BYTES = 0.160, 0.320, 64 * 1024
TWIN, SINGLE = Case("twin", "twin"), Case("single", "single")


class Model(NamedTuple):
    """A model and the values of M.

    Attributes:
        rows_each: of a micro-batch; None: the mini-batch has the same rows for each M.
    """

    work: Work
    counts: tuple[int, ...]
    schedules: tuple[str, ...] = ("gpipe",)
    rows_each: int | None = None
    options: Options = Options("none", partition="profile")

    def with_micro_batches(self, count: int, *, quick: bool) -> Work:
        """The work; of growing mini-batches about as many micro-batches are measured for each M."""
        work = replace(self.work, micro_batches=count)
        if self.rows_each is not None:
            work = replace(work, rows=self.rows_each * count, steps=max(2, 16 // count))
        return work.tiny() if quick else work

    def cases(self, count: int) -> list[Case]:
        """Half of one micro-batch is another size: M = 1 has no twin."""
        ours = [Case(f"ours {name}", "ours", replace(self.options, schedule=name)) for name in self.schedules]
        has_single = count == 1 or self.rows_each is not None
        return [*[SINGLE] * has_single, *[TWIN] * (count > 1), *ours]


MODELS = {
    "llama": Model(Work(), (1, 4, 32), ("gpipe", "1f1b"), 2, Options("none", blocks=(5, 3))),
    "resnet": Model(ResNetWork(steps=3), (1, 8, 32)),
    "transformer": Model(Gpt2Work(steps=3), (1, 8, 32)),
}


def emulated(schedule: str, steps: int, scale: float, counts: Sequence[int]) -> dict[tuple[int, int], list[float]]:
    """Micro-batches per second of each (K, M)."""
    keys = [(k, m) for k in PROCESSES for m in counts]
    settings = [
        Emulated(
            build(schedule, k, m, recompute="none"),
            Costs(scale * FORWARD_SECONDS / k, scale * BACKWARD_SECONDS / k),
            BOUNDARY_BYTES,
        )
        for k, m in keys
    ]
    return {(k, m): [m / s.seconds for s in own] for (k, m), own in zip(keys, emulate(settings, steps), strict=True)}


def emulated_table(rates: dict[tuple[int, int], list[float]], schedule: str) -> str:
    base = Spread.of(rates[PROCESSES[0], 1]).median
    rows = []
    for m in dict.fromkeys(m for _, m in rates):
        row = [f"M = {m}"]
        for k, paper in zip(PROCESSES, PAPER[m], strict=True):
            spread = Spread.of(rate / base for rate in rates[k, m])
            row += [spread.text(), f"{m * k / (m + k - 1):.2f}", f"{paper:g}"]
        rows.append(row)
    header = [f"{schedule}, emulated"] + [cell for k in PROCESSES for cell in (f"K = {k}", "bound", "paper")]
    return table(header, rows)


def measured_table(name: str, seconds: dict[tuple[str, int], list[float]], rows_of: dict[int, int]) -> str:
    rates = {(case, m): [rows_of[m] / duration for duration in own] for (case, m), own in seconds.items()}
    rows = []
    for (case, m), own in rates.items():
        bases = (rates.get((case, 1)), rates.get(("single", m), rates.get(("single", 1))), rates.get(("twin", m)))
        over = [paired(own, base).text() if base else "" for base in bases]
        times = ["", ""]
        if case.startswith("ours"):
            limit = m / (m + 1)
            of_limit = [rate * limit for rate in rates.get(("twin", m), [])]
            times = [paired(own, of_limit).text() if of_limit else "", f"{2 * limit:.2f}"]
        rows.append([case, m, Spread.of(seconds[case, m]).text(), Spread.of(own).text(), *over, *times])
    header = [name, "M", "seconds a step", "rows/s", "x its M = 1", "x single", "x twin", "of twin x M / (M + 1)"]
    return table([*header, "bound"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, reps=3)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--micro-batches", nargs="+", type=int, metavar="M", help="beside 1; default: of the model")
    parser.add_argument("--partition", nargs=2, type=int, metavar="LAYERS", help="of both stages; default: measured")
    options = parser.parse_args(argv)
    model, quick = MODELS[options.model], options.quick
    if options.partition:
        model = model._replace(options=replace(model.options, blocks=(), partition=tuple(options.partition)))
    counts = [1, *(options.micro_batches or model.counts[1:])]
    counts = counts[:2] if quick else counts
    cells: list[dict[str, Any]] = []
    for schedule in model.schedules if options.model == "llama" else ():
        rates = emulated(schedule, 1 if quick else options.reps, 0.01 if quick else 1.0, counts)
        print(f"{emulated_table(rates, schedule)}\n", flush=True)
        cells += [{"K": k, "M": m, "schedule": schedule, "rates": own} for (k, m), own in rates.items()]
    works = {count: model.with_micro_batches(count, quick=quick) for count in counts}

    def seconds(case: Case, count: int) -> float:
        return measure(case.contender, works[count], case.options, fork=quick).seconds

    every = [(case, count) for count in counts for case in model.cases(count)]
    runs = take_turns({(case.name, m): lambda case=case, m=m: seconds(case, m) for case, m in every}, options)
    print(measured_table(options.model, runs, {count: work.rows for count, work in works.items()}))
    measured = [{"case": name, "M": m, "seconds": own} for (name, m), own in runs.items()]
    write_json(options.json, model=options.model, emulated=cells, measured=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
