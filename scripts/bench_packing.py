"""Tokens per second of packed mini-batches, against padded and length-bucketed ones of the same rows.

    python scripts/bench_packing.py                              two processes, a llama of 8 blocks of width 256
    python scripts/bench_packing.py --schedule zb_h1 --attention eager
    python scripts/bench_packing.py --quick                      a trial run of seconds

The rows' lengths are drawn like those of chats, from 32 to 2048 tokens. padded: mini-batches of random rows, each
micro-batch as long as its longest row. bucketed: rows of similar length share a mini-batch and a micro-batch. packed:
the mini-batches of padded, packed. The ways take turns; tokens are the rows' own, without padding, of forwards and
backwards without updates. The ratios are of one repetition each; medians, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from bench.packing import WAYS, measure
from bench.processes import run_job

QUICK = {
    "rows": 12,
    "batch_size": 6,
    "micro_batches": 3,
    "width": 64,
    "blocks": 2,
    "repetitions": 1,
    "shortest": 4,
    "median": 20,
    "longest": 64,
}


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    job = {name: value for name, value in vars(options).items() if name not in ("json", "quick")}
    if options.quick:
        job |= QUICK
    parts = run_job(measure, job, job["stages"], timeout_seconds=7200)
    tokens = parts[0]["tokens"]
    rates = {
        way: [tokens / max(times) for times in zip(*(part["seconds"][way] for part in parts), strict=True)]
        for way in WAYS
    }
    ratios = {
        way: [packed / other for packed, other in zip(rates["packed"], rates[way], strict=True)]
        for way in WAYS
        if way != "packed"
    }
    print(f"{job['rows']} rows, {tokens} tokens, {job['shortest']} to {job['longest']}; K = {job['stages']}")
    print("| way | tokens per second | computed for one token |")
    print("|---|---|---|")
    for way, found in rates.items():
        print(f"| {way} | {_text(found, '.0f')} | {parts[0]['computed_tokens'][way] / tokens:.2f} |")
    for way, found in ratios.items():
        print(f"packed over {way}: {_text(found, '.2f')}")
    print(f"largest difference of a mini-batch's loss, packed and padded: {parts[0]['loss_difference']:.1e}")
    if options.json is not None:
        report = {"job": job, "tokens_per_second": rates, "packed_over": ratios, **parts[0]}
        options.json.write_text(json.dumps(report, indent=2))


def _text(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: dict[str, Any] = {
        **{"rows": 128, "batch_size": 32, "micro_batches": 8, "stages": 2, "width": 256, "blocks": 8},
        **{"vocabulary": 8000, "shortest": 32, "longest": 2048, "median": 300, "repetitions": 3, "seed": 0},
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a row's length; default: 1")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--attention", default="sdpa", help="sdpa or eager")
    parser.add_argument("--quick", action="store_true", help="a trial run")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


if __name__ == "__main__":
    main()
