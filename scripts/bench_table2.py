"""GPipe's Table 2 (arXiv 1811.06965): throughput over K and M, normalised to K = 2, M = 1.

The micro-batch has one size throughout, so the mini-batch grows with M. K = 2 is measured, beside one process that
takes the same micro-batches and "twin", two processes of half the rows each that share nothing: what two cores of the
machine give. K = 2, 4 and 8 are emulated: a model of fixed size in K stages that wait instead of computing.

    python scripts/bench_table2.py [--reps 5] [--json FILE]        about 25 minutes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.contenders import Options
from bench.emulation import Emulated, emulate
from bench.measure import measure
from bench.report import Spread, paired, table, write_json
from bench.runner import bench_parser, take_turns
from bench.settings import Case
from bench.work import Work

PROCESSES, MICRO_BATCHES = (2, 4, 8), (1, 4, 32)
ROWS_EACH = 2
#: The paper's Transformer-48 by M, for each K. Its cells of M = 4 exceed the bound: the batch size was adjusted there.
PAPER = {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}
#: Of the whole model for one micro-batch, and what crosses a boundary.
FORWARD_SECONDS, BACKWARD_SECONDS, BOUNDARY_BYTES = 0.160, 0.320, 64 * 1024
OURS = tuple(Case(f"ours {name}", "ours", Options("none", name, 5)) for name in ("gpipe", "1f1b"))
CASES = (Case("single", "single"), Case("twin", "twin"), *OURS)

RowsPerSecond = dict[tuple[str, int], list[float]]
"""The repetitions of each (case, M)."""


def rows_per_second(case: Case, micro_batches: int, *, quick: bool) -> float:
    """One run with a mini-batch of M equal micro-batches; about as many of them are measured for each M."""
    steps = max(2, 16 // micro_batches)
    work = Work(rows=ROWS_EACH * micro_batches, micro_batches=micro_batches, steps=steps)
    work = work.tiny() if quick else work
    return work.rows / measure(case.contender, work, case.options, fork=quick).seconds


def emulated(
    schedule: str, steps: int, scale: float, micro_batches: Sequence[int]
) -> dict[tuple[int, int], list[float]]:
    """Micro-batches per second of each (K, M)."""
    settings = [
        Emulated(schedule, k, m, scale * FORWARD_SECONDS / k, scale * BACKWARD_SECONDS / k, BOUNDARY_BYTES)
        for k in PROCESSES
        for m in micro_batches
    ]
    runs = zip(settings, emulate(settings, steps), strict=True)
    return {
        (setting.processes, setting.micro_batches): [setting.micro_batches / s.seconds for s in own]
        for setting, own in runs
    }


def measured_table(rates: RowsPerSecond) -> str:
    rows = []
    for (name, m), own in rates.items():
        base = rates.get((name, MICRO_BATCHES[0]))
        rows.append(
            [
                *(name, m, Spread.of(own).text()),
                f"{Spread.of(own).median / Spread.of(base).median:.2f}" if base else "",
                paired(own, rates["single", m]).text(),
                paired(own, rates["twin", m]).text() if ("twin", m) in rates else "",
                f"{2 * m / (m + 1):.2f}" if name.startswith("ours") else "",
            ]
        )
    return table(["K = 2, measured", "M", "rows/s", "x its M = 1", "x single", "x twin", "bound"], rows)


def emulated_table(rates: dict[tuple[int, int], list[float]], schedule: str) -> str:
    base = Spread.of(rates[PROCESSES[0], MICRO_BATCHES[0]]).median
    rows = []
    for m in dict.fromkeys(m for _, m in rates):
        row = [f"M = {m}"]
        for k, paper in zip(PROCESSES, PAPER[m], strict=True):
            spread = Spread.of(rate / base for rate in rates[k, m])
            row += [spread.text(), f"{m * k / (m + k - 1):.2f}", f"{paper:g}"]
        rows.append(row)
    header = [f"{schedule}, emulated"] + [cell for k in PROCESSES for cell in (f"K = {k}", "bound", "paper")]
    return table(header, rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = bench_parser(__doc__, reps=5).parse_args(argv)
    reps, scale = (1, 0.01) if options.quick else (options.reps, 1.0)
    sizes = MICRO_BATCHES[:2] if options.quick else MICRO_BATCHES
    waited = {schedule: emulated(schedule, reps, scale, sizes) for schedule in ("gpipe", "1f1b")}
    for schedule, of_schedule in waited.items():
        print(f"{emulated_table(of_schedule, schedule)}\n", flush=True)
    # Half of one micro-batch is another size: M = 1 has no twin.
    counts = MICRO_BATCHES[1:2] if options.quick else MICRO_BATCHES
    plan = [(case, m) for m in counts for case in CASES if case.name != "twin" or m > 1]
    rates: RowsPerSecond = take_turns(
        {(case.name, m): lambda case=case, m=m: rows_per_second(case, m, quick=options.quick) for case, m in plan},
        options,
    )
    print(measured_table(rates))
    cells = [
        {"K": k, "M": m, "schedule": s, "rates": own} for s, all_ in waited.items() for (k, m), own in all_.items()
    ]
    runs = [{"case": name, "M": m, "rows_per_second": own} for (name, m), own in rates.items()]
    write_json(options.json, emulated=cells, measured=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
