"""The head's loss in chunks of positions beside whole logits: time and memory of a last stage over the vocabulary.

The stage has Llama blocks, the norm and the head, and runs one F and B of a micro-batch in float32. "MB" is how much
its process grows in a step, beyond weights and gradients, which are there before. "chunks" is what a pipeline runs;
"whole" makes the logits (B, T, V) in F and keeps their gradient until B.

    python scripts/bench_head.py [--json FILE]        about 15 minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import machine
from bench.last_stage import measure_process
from bench.processes import run_job
from bench.report import MEGABYTE, Spread, paired, table, write_json

HOW = ("whole", "chunks")
LOSS_TOLERANCE = 1e-4

Runs = dict[str, list[dict[str, Any]]]


def measure(job: dict[str, Any], reps: int, quiet: float, *, fork: bool) -> Runs:
    """Alternating repetitions of both, in fresh processes."""
    runs: Runs = {how: [] for how in HOW}
    for rep in range(reps):
        for how in HOW if rep % 2 == 0 else reversed(HOW):
            if quiet and not machine.wait_until_quiet(quiet):
                print("the machine did not become quiet", file=sys.stderr)
            runs[how] += run_job(measure_process, {**job, "how": how}, 1, fork=fork, timeout_seconds=1800)
        print(f"V = {job['vocabulary']}, repetition {rep + 1} of {reps}", file=sys.stderr, flush=True)
    return runs


def seconds_of(runs: Runs, how: str) -> list[float]:
    return [median(one["seconds"]) for one in runs[how]]


def bytes_of(runs: Runs, how: str) -> list[int]:
    return [one["grown_bytes"] for one in runs[how]]


def summary(found: dict[int, Runs]) -> str:
    rows = []
    for vocabulary, runs in found.items():
        rows.append(
            [
                f"{vocabulary}",
                *(Spread.of(seconds_of(runs, how)).text(3) for how in HOW),
                paired(seconds_of(runs, "chunks"), seconds_of(runs, "whole")).text(),
                *(Spread.of(size / MEGABYTE for size in bytes_of(runs, how)).text(0) for how in HOW),
                paired(bytes_of(runs, "chunks"), bytes_of(runs, "whole")).text(3),
            ]
        )
    header = ["V", "whole, seconds", "chunks, seconds", "ratio", "whole, MB", "chunks, MB", "ratio"]
    return table(header, rows)


def differing(found: dict[int, Runs]) -> list[str]:
    """Vocabularies for which the losses are not the same."""
    wrong = []
    for vocabulary, runs in found.items():
        losses = [one["loss"] for several in runs.values() for one in several]
        if not max(losses) - min(losses) <= LOSS_TOLERANCE * abs(losses[0]):
            wrong.append(f"V = {vocabulary}: the losses are from {min(losses)} to {max(losses)}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_768, 131_072], metavar="V")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="measured in each process, after two that are not")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reps", type=int, default=5, help="repetitions")
    parser.add_argument("--quiet", type=float, default=120, help="seconds to wait for a quiet machine before each run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once, to see that everything runs")
    arguments = parser.parse_args(argv)
    vocabularies, reps, quiet = arguments.vocabularies, arguments.reps, arguments.quiet
    job = {name: getattr(arguments, name) for name in ("width", "blocks", "rows", "tokens", "steps", "threads")}
    if arguments.quick:
        vocabularies, reps, quiet = [64, 128], 1, 0.0
        job = {**job, "width": 16, "rows": 2, "tokens": 8, "steps": 1}
    found = {
        vocabulary: measure({**job, "vocabulary": vocabulary}, reps, quiet, fork=arguments.quick)
        for vocabulary in vocabularies
    }
    print(summary(found))
    rows = [{**job, "vocabulary": vocabulary, "runs": runs} for vocabulary, runs in found.items()]
    write_json(arguments.json, {"environment": machine.environment(), "rows": rows})
    wrong = differing(found)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
