"""hf_gpipe beside other trainers on identical work: a Llama of 8 layers and width 384 on the CPU, two processes, gloo.

The setting "mesh" has replicas: two processes of one stage, and two pipelines of two stages in four processes.

Every run is in fresh processes with one thread each, and starts when the machine is quiet. Repetitions alternate: each
takes every case once, every other one in reverse, and ratios are taken within a repetition. All cases of a setting must
end at the same loss. "twin" is not a trainer but two processes that share nothing: what two cores of the machine give.

    python scripts/bench_peers.py                      all settings, 5 repetitions, about an hour
    python scripts/bench_peers.py --list
    python scripts/bench_peers.py --settings on --only single "torch Schedule1F1B" "ours 1f1b stage" --json on.json
    python scripts/bench_peers.py --settings on --splits 3 4 5 --reps 1      where to cut
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import machine
from bench.contenders import CONTENDERS
from bench.measure import Measured, measure
from bench.report import MEGABYTE, Spread, paired, table, write_json
from bench.settings import SETTINGS, Claim, Setting

#: How far apart the losses of two cases may be at the end, relative to the loss: other orders of float32 sums.
LOSS_TOLERANCE = 1e-4

Runs = dict[str, list[Measured]]
"""The repetitions of each case, by its name."""


def run(setting: Setting, reps: int, quiet_seconds: float, *, fork: bool) -> Runs:
    """Measure every case `reps` times, in turn."""
    runs: Runs = {case.name: [] for case in setting.cases}
    for rep in range(reps):
        for case in setting.cases[:: -1 if rep % 2 else 1]:
            if quiet_seconds and not machine.wait_until_quiet(quiet_seconds):
                print(f"the machine is not quiet: {case.name} shares it", file=sys.stderr)
            measured = measure(case.contender, setting.work, case.options, fork=fork)
            runs[case.name].append(measured)
            print(f"{setting.name} {rep + 1}/{reps}: {case.name} {measured.seconds:.3f} s", file=sys.stderr, flush=True)
    return runs


def seconds(runs: Sequence[Measured]) -> list[float]:
    return [one.seconds for one in runs]


def largest(runs: Sequence[Measured]) -> list[float]:
    """The peak of the larger process, of each repetition."""
    return [max(one.peak_bytes) for one in runs]


def summary(setting: Setting, runs: Runs) -> str:
    """The table of a setting."""
    ideal = 2 * setting.work.micro_batches / (setting.work.micro_batches + 1)
    rows = []
    for case in setting.cases:
        own = runs[case.name]
        ratios = {name: paired(seconds(runs[name]), seconds(own)) for name in ("single", "twin") if name in runs}
        is_pipeline = CONTENDERS[case.contender].trains and case.contender not in ("single", "ddp")
        is_pipeline = is_pipeline and case.options.replicas == 1
        loss = own[0].last_loss
        rows.append(
            [
                case.name,
                Spread.of(seconds(own)).text(3),
                ratios["single"].text() if "single" in ratios else "",
                f"{ratios['single'].median / ideal:.2f}" if "single" in ratios and is_pipeline else "",
                f"{ratios['twin'].median:.2f}" if "twin" in ratios else "",
                "/".join(
                    f"{Spread.of(peaks).median / MEGABYTE:.0f}"
                    for peaks in zip(*(one.peak_bytes for one in own), strict=True)
                ),
                "" if loss is None else f"{loss:.5f}",
            ]
        )
    header = ["", "seconds a step", "x single", f"of {ideal:.2f}", "x twin", "peak MB", "last loss"]
    return f"{setting.title}\n\n{table(header, rows)}"


def judge(claim: Claim, runs: Runs) -> dict[str, Any]:
    """The ratio that a claim is about, and whether it was reached."""
    allowance = claim.bubble_of / (claim.bubble_of + 1) if claim.bubble_of else 1.0
    speed = paired([one / allowance for one in seconds(runs[claim.over])], seconds(runs[claim.case]))
    memory = paired(largest(runs[claim.case]), largest(runs[claim.over]))
    fits = claim.memory_at_most is None or memory.median <= claim.memory_at_most
    return {
        "claim": claim.text(),
        "speed": asdict(speed),
        "at_least": claim.at_least,
        "memory": asdict(memory),
        "memory_at_most": claim.memory_at_most,
        "reached": speed.median >= claim.at_least and fits,
    }


def verdicts(judged: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            one["claim"],
            Spread(**one["speed"]).text(),
            f"{one['at_least']:.2f}",
            Spread(**one["memory"]).text(),
            "" if one["memory_at_most"] is None else f"{one['memory_at_most']:.2f}",
            "yes" if one["reached"] else "no",
        ]
        for one in judged
    ]
    return table(["", "speed", "at least", "memory", "at most", "reached"], rows)


def differing(setting: Setting, runs: Runs) -> list[str]:
    """Cases whose first or last loss is not that of the first case."""
    found = []
    wanted: Measured | None = None
    for case in setting.cases:
        for one in runs[case.name]:
            if one.first_loss is None or one.last_loss is None:
                continue
            wanted = wanted or one
            assert wanted.first_loss is not None
            assert wanted.last_loss is not None
            pairs = (one.first_loss, wanted.first_loss), (one.last_loss, wanted.last_loss)
            if any(not abs(a - b) <= LOSS_TOLERANCE * abs(b) for a, b in pairs):
                found.append(f"{setting.name}: {case.name} goes from loss {pairs[0][0]} to {pairs[1][0]}")
    return found


def selected(setting: Setting, only: Sequence[str] | None) -> Setting:
    """The cases that were asked for and whose library is there, and the claims about them."""
    cases = []
    for case in setting.cases:
        if only and case.name not in only:
            continue
        if CONTENDERS[case.contender].is_installed:
            cases.append(case)
        else:
            print(f"{case.name} is not installed", file=sys.stderr)
    names = {case.name for case in cases}
    claims = tuple(claim for claim in setting.claims if {claim.case, claim.over} <= names)
    return replace(setting, cases=tuple(cases), claims=claims)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--list", action="store_true", help="print the settings and their cases")
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names of cases")
    parser.add_argument("--splits", nargs="+", type=int, help="take every pipeline with these many blocks first")
    parser.add_argument("--reps", type=int, default=5, help="repetitions")
    parser.add_argument("--quiet", type=float, default=120, help="seconds to wait for a quiet machine before each run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once, to see that everything runs")
    arguments = parser.parse_args(argv)
    settings = [setting for setting in SETTINGS if setting.name in arguments.settings]
    if arguments.list:
        for setting in settings:
            print(f"{setting.name}: {setting.title}", *(f"    {case.name}" for case in setting.cases), sep="\n")
        return 0
    results, wrong = [], []
    for setting in settings:
        setting = setting.tiny() if arguments.quick else setting
        setting = setting.with_splits(arguments.splits) if arguments.splits else setting
        setting = selected(setting, arguments.only)
        if arguments.quick:
            for case in setting.cases:
                CONTENDERS[case.contender].load()
        reps, quiet = (1, 0.0) if arguments.quick else (arguments.reps, arguments.quiet)
        runs = run(setting, reps, quiet, fork=arguments.quick)
        judged = [judge(claim, runs) for claim in setting.claims]
        wrong += differing(setting, runs)
        print(summary(setting, runs), "\n")
        if judged:
            print(verdicts(judged), "\n", flush=True)
        measured = {name: [asdict(one) for one in several] for name, several in runs.items()}
        results.append({"setting": asdict(setting), "runs": measured, "claims": judged})
        write_json(arguments.json, {"environment": machine.environment(), "results": results})
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
