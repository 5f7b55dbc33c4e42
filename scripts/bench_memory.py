"""Activation memory over M and L: under recompute "stage" it follows O(N + (L/K)(N/M)) (GPipe, arXiv 1811.06965, 2.3).

The middle one of K = 3 stages under "gpipe" keeps, for N rows in M micro-batches and L/K blocks,

    none    N (L/K) A               A: bytes that autograd saves in a block for one row, counted once
    block   N (L/K) B               B: bytes of one row's hidden states, which cross each boundary
    stage   N B + (L/K)(N/M) A

"saved" counts the distinct storages that autograd saves and the boundaries that the stage keeps, without parameters, at
their largest sum. transformers' own checkpointing hides the one block that "block" has recomputed, (N/M) A, from the
count. "process" is how much the process grows during a step, with all temporaries.

    python scripts/bench_memory.py [--json FILE]        about 15 minutes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.processes import run_job
from bench.report import MEGABYTE, table, write_json
from bench.stage_memory import NUM_STAGES, measure_process
from bench.work import Work

MODES = ("none", "block", "stage")
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Kept:
    """The bytes that the middle stage kept in a step."""

    recompute: str
    work: Work
    saved_bytes: int
    process_bytes: int

    def formula_bytes(self, block_row_bytes: float) -> float:
        """See the top of this file; `block_row_bytes` is A."""
        blocks, rows = self.work.layers // NUM_STAGES, self.work.rows
        row_bytes = self.work.tokens * self.work.hidden * FLOAT_BYTES
        return {
            "none": rows * blocks * block_row_bytes,
            "block": float(rows * blocks * row_bytes),
            "stage": rows * row_bytes + blocks * rows / self.work.micro_batches * block_row_bytes,
        }[self.recompute]


def measure(recompute: str, work: Work, *, fork: bool) -> Kept:
    parts = run_job(measure_process, {"recompute": recompute, "work": asdict(work)}, NUM_STAGES, fork=fork)
    middle: dict[str, Any] = parts[NUM_STAGES // 2]
    return Kept(recompute, work, middle["saved_bytes"], middle["process_bytes"])


def block_row_bytes(found: list[Kept]) -> float:
    """A, from the deepest run without recomputation."""
    deepest = max((one for one in found if one.recompute == "none"), key=lambda one: one.work.layers)
    return deepest.saved_bytes / (deepest.work.rows * deepest.work.layers // NUM_STAGES)


def summary(found: list[Kept]) -> str:
    each = block_row_bytes(found)
    rows = [
        [
            one.recompute,
            f"{one.work.layers}",
            f"{one.work.micro_batches}",
            f"{one.saved_bytes / MEGABYTE:.1f}",
            f"{one.formula_bytes(each) / MEGABYTE:.1f}",
            f"{one.saved_bytes / one.formula_bytes(each):.2f}",
            f"{one.process_bytes / MEGABYTE:.1f}",
        ]
        for one in found
    ]
    return table(["recompute", "L", "M", "saved MB", "formula MB", "ratio", "process MB"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 24], metavar="L", help="multiples of 3")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="M")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that everything runs")
    arguments = parser.parse_args(argv)
    layers, micro_batches, base = arguments.layers, arguments.micro_batches, Work(vocabulary=1024)
    if arguments.quick:
        layers, micro_batches = [6], [4]
        base = Work(hidden=64, intermediate=64, vocabulary=128, tokens=24)
    found = []
    for recompute in MODES:
        for num_layers in layers:
            for m in micro_batches:
                work = Work(**{**asdict(base), "layers": num_layers, "micro_batches": m})
                found.append(measure(recompute, work, fork=arguments.quick))
                print(f"{recompute}, L = {num_layers}, M = {m}", file=sys.stderr, flush=True)
    print(summary(found))
    each = block_row_bytes(found)
    rows = [asdict(one) | {"formula_bytes": one.formula_bytes(each)} for one in found]
    write_json(arguments.json, {"block_row_bytes": each, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
