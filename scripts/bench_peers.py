"""hf_gpipe beside other trainers on identical work: a Llama of 8 layers and width 384 on the CPU, two processes, gloo.

The setting "mesh" has replicas: two processes of one stage, and two pipelines of two stages in four processes.

Every run is in fresh processes with one thread each, and starts when the machine is quiet. Repetitions alternate: each
takes every case once, every other one in reverse, and ratios are taken within a repetition. All cases of a setting must
end at the same loss. "twin" is not a trainer but two processes that share nothing: what two cores of the machine give.

    python scripts/bench_peers.py                      all settings, 5 repetitions, about an hour
    python scripts/bench_peers.py --settings on --only single "torch Schedule1F1B" "ours 1f1b stage" --json on.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from bench.contenders import CONTENDERS
from bench.measure import Measured, measure
from bench.report import MEGABYTE, Spread, paired, table, write_json
from bench.runner import bench_parser, say, take_turns
from bench.settings import SETTINGS, Pair, Setting

#: How far apart the losses of two cases may be at the end, relative to the loss: other orders of float32 sums.
LOSS_TOLERANCE = 1e-4

Runs = dict[str, list[Measured]]
"""The repetitions of each case, by its name."""


def seconds(runs: Sequence[Measured]) -> list[float]:
    return [run.seconds for run in runs]


def largest(runs: Sequence[Measured]) -> list[float]:
    """The peak of the larger process, of each repetition."""
    return [max(run.peak_bytes) for run in runs]


def summary(setting: Setting, runs: Runs) -> str:
    """The table of a setting."""
    ideal = 2 * setting.work.micro_batches / (setting.work.micro_batches + 1)
    rows = []
    for case in setting.cases:
        own = runs[case.name]
        single, twin = (
            paired(seconds(runs[base]), seconds(own)) if base in runs else None for base in ("single", "twin")
        )
        is_pipeline = case.contender not in ("single", "twin", "ddp") and case.options.replicas == 1
        peaks = zip(*(run.peak_bytes for run in own), strict=True)
        rows.append(
            [
                *(case.name, Spread.of(seconds(own)).text(3), single.text() if single else ""),
                f"{single.median / ideal:.2f}" if single and is_pipeline else "",
                f"{twin.median:.2f}" if twin else "",
                "/".join(f"{Spread.of(of_process).median / MEGABYTE:.0f}" for of_process in peaks),
                f"{own[0].losses[-1]:.5f}" if own[0].losses else "",
            ]
        )
    header = ["", "seconds a step", "x single", f"of {ideal:.2f}", "x twin", "peak MB", "last loss"]
    return f"{setting.title}\n\n{table(header, rows)}"


def ratios(pair: Pair, runs: Runs) -> dict[str, Any]:
    """By how much the first case of a pair is faster than the second, and how much memory it takes of its."""
    allowance = pair.bubble_of / (pair.bubble_of + 1) if pair.bubble_of else 1.0
    speed = paired([duration / allowance for duration in seconds(runs[pair.over])], seconds(runs[pair.case]))
    return {"pair": pair.text(), "speed": speed, "memory": paired(largest(runs[pair.case]), largest(runs[pair.over]))}


def differing(setting: Setting, runs: Runs) -> list[str]:
    """Cases whose first or last loss is not that of the first case."""
    ends = [
        (case.name, run.losses[0], run.losses[-1]) for case in setting.cases for run in runs[case.name] if run.losses
    ]
    return [
        f"{setting.name}: {name} goes from loss {first} to {last}"
        for name, first, last in ends
        if any(not abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in zip((first, last), ends[0][1:], strict=True))
    ]


def selected(setting: Setting, only: Sequence[str] | None) -> Setting:
    """The cases that were asked for and whose library is there, and the pairs of them."""
    asked = [case for case in setting.cases if not only or case.name in only]
    cases = tuple(case for case in asked if CONTENDERS[case.contender].is_installed)
    for case in asked:
        if case not in cases:
            say(f"{case.name} is not installed")
    names = {case.name for case in cases}
    return replace(setting, cases=cases, pairs=tuple(pair for pair in setting.pairs if {pair.case, pair.over} <= names))


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, reps=5)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases")
    options = parser.parse_args(argv)
    results, wrong = [], []
    for setting in SETTINGS:
        if setting.name not in options.settings:
            continue
        if options.quick:
            count = 4 * max(case.options.replicas for case in setting.cases)  # of each pipeline four
            tiny = setting.work.tiny(micro_batches=min(setting.work.micro_batches, count))
            setting = replace(setting, work=tiny, pairs=())
        setting = selected(setting, options.only)
        run = partial(measure, work=setting.work, fork=options.quick)
        cases = {case.name: partial(run, case.contender, options=case.options) for case in setting.cases}
        runs = take_turns(cases, options)
        told = [ratios(pair, runs) for pair in setting.pairs]
        wrong += differing(setting, runs)
        print(summary(setting, runs), "\n", flush=True)
        if told:
            rows = [[own["pair"], own["speed"].text(), own["memory"].text()] for own in told]
            print(table(["", "speed", "memory"], rows), "\n", flush=True)
        measured = {name: [asdict(result) for result in several] for name, several in runs.items()}
        results.append({"setting": asdict(setting), "runs": measured, "pairs": told})
        write_json(options.json, results=results)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
