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

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bench import machine
from bench.processes import run_job
from bench.report import MEGABYTE, table, write_json
from bench.runner import bench_parser, say
from bench.saved_bytes import SavedBytes
from bench.work import Work

from hf_gpipe import Pipeline
from hf_gpipe.runtime.micro_batch import Context

#: Of three stages the middle one both receives and sends hidden states, and has neither embedding nor head.
NUM_STAGES, MIDDLE = 3, 1
FLOAT_BYTES = 4


def measure(recompute: str, work: Work) -> dict[str, int]:
    """One process's part: bytes saved for backward at their peak, and the growth of the process during a step."""
    blocks = work.layers // NUM_STAGES
    partition = [1 + blocks, blocks, blocks + 2]
    pipe = Pipeline(work.model(), NUM_STAGES, work.micro_batches, "gpipe", recompute, partition)
    batch = work.batch()
    # Gradients are there from now on, so that no later step adds them.
    pipe.train_step(batch)
    machine.reset_peak()
    before = machine.resident_bytes()
    pipe.train_step(batch)
    process_bytes = machine.peak_bytes() - before

    stage = pipe.stages[int(os.environ["RANK"])]
    saved = SavedBytes([*pipe.parameters(), *stage.model.buffers.values()])
    forward = stage.forward

    def counted_forward(context: Context, **how: Any) -> Any:
        for tensor in context.carry.values():
            saved.hold(tensor, tensor)
        return forward(context, **how)

    stage.forward = counted_forward  # type: ignore[method-assign]  # of this one stage
    with saved.counting():
        pipe.train_step(batch)
    return {"saved_bytes": saved.peak_bytes, "process_bytes": process_bytes}


def formula_bytes(recompute: str, work: Work, block_row_bytes: float) -> float:
    """See the top of this file; `block_row_bytes` is A."""
    blocks, row_bytes = work.layers // NUM_STAGES, work.tokens * work.hidden * FLOAT_BYTES
    if recompute == "stage":
        return work.rows * row_bytes + blocks * work.rows / work.micro_batches * block_row_bytes
    return float(work.rows * blocks * (block_row_bytes if recompute == "none" else row_bytes))


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 24], metavar="L", help="multiples of 3")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 4, 8, 16], metavar="M")
    options = parser.parse_args(argv)
    layers, micro_batches, base = options.layers, options.micro_batches, Work(vocabulary=1024)
    if options.quick:
        layers, micro_batches, base = [6], [4], base.tiny()
    results: list[tuple[str, Work, dict[str, int]]] = []
    for recompute in ("none", "block", "stage"):
        for work in (replace(base, layers=count, micro_batches=m) for count in layers for m in micro_batches):
            parts = run_job(measure, (recompute, work), NUM_STAGES, fork=options.quick)
            results.append((recompute, work, parts[MIDDLE]))
            say(f"{recompute}, L = {work.layers}, M = {work.micro_batches}")
    # A, from the deepest run without recomputation.
    _, deepest, kept = max((result for result in results if result[0] == "none"), key=lambda result: result[1].layers)
    each = kept["saved_bytes"] / (deepest.rows * deepest.layers // NUM_STAGES)
    rows, cells = [], []
    for recompute, work, kept in results:
        saved, formula = kept["saved_bytes"], formula_bytes(recompute, work, each)
        rows.append({"recompute": recompute, "work": asdict(work), **kept, "formula_bytes": formula})
        sizes = [f"{size / MEGABYTE:.1f}" for size in (saved, formula, kept["process_bytes"])]
        cells.append([recompute, work.layers, work.micro_batches, *sizes[:2], f"{saved / formula:.2f}", sizes[2]])
    print(table(["recompute", "L", "M", "saved MB", "formula MB", "ratio", "process MB"], cells))
    write_json(options.json, block_row_bytes=each, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
