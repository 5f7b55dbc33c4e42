"""The strategies of examples/three_strategies.ipynb beside "twin": ResNet-50 and a GPT-2, a mini-batch of 128 rows.

"single" is one process with the plain model, which adds up M micro-batches. "twin" is two of them at once with half of
the rows each, that is M / 2 micro-batches, and without communication: the most that two cores of the machine can do.
"naive" is hf_gpipe in two processes with M = 1, and "gpipe" with M micro-batches; nothing is recomputed. A step
includes the update.

    python scripts/bench_strategies.py resnet          about 10 minutes
    python scripts/bench_strategies.py transformer --micro-batches 32 --partition 8 7
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.contenders import Options
from bench.measure import measure
from bench.report import Spread, paired, table, write_json
from bench.runner import bench_parser, take_turns
from bench.settings import Case
from bench.work import Gpt2Work, ResNetWork

WORKS = {"resnet": ResNetWork(steps=3), "transformer": Gpt2Work(steps=3)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, reps=3)
    parser.add_argument("model", choices=WORKS)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[8, 32], metavar="M", help="of gpipe and twin")
    parser.add_argument("--partition", nargs=2, type=int, metavar="LAYERS", help="of both stages; default: measured")
    options = parser.parse_args(argv)
    work, counts = WORKS[options.model], options.micro_batches
    if options.quick:
        work, counts = work.tiny(), counts[:1]
    ours = Options("none", "gpipe", partition=tuple(options.partition or ()) or "profile")
    cases = [(Case("single", "single"), 1), (Case("naive", "ours", ours), 1)]
    cases += [(case, m) for m in counts for case in (Case("twin", "twin"), Case("gpipe", "ours", ours))]

    def seconds(case: Case, micro_batches: int) -> float:
        run = replace(work, micro_batches=micro_batches)
        return measure(case.contender, run, case.options, fork=options.quick).seconds

    results = take_turns({(case.name, m): lambda case=case, m=m: seconds(case, m) for case, m in cases}, options)
    rows = []
    for (name, m), own in results.items():
        rows.append([name, m, Spread.of(own).text(), paired(results["single", 1], own).text(), "", ""])
        if name == "gpipe":
            ratio = paired([duration * (m + 1) / m for duration in results["twin", m]], own)
            rows[-1][-2:] = [paired(results["naive", 1], own).text(), ratio.text()]
    print(table([options.model, "M", "seconds a step", "x single", "x naive", "of twin x M / (M + 1)"], rows))
    runs = [{"case": name, "M": m, "seconds": own} for (name, m), own in results.items()]
    write_json(options.json, model=options.model, measured=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
