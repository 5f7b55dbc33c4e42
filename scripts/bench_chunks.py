"""Training on long rows in chunks of tokens against whole rows: seconds of a step, memory of each process, and losses.

Two processes hold a stage each, joined by gloo, with one thread each, under "1f1b". A small llama learns the bytes of
the help texts that Python brings with it, one row a step. Whole rows are never recomputed: a row is a stage's only
micro-batch. The runs take turns, each in fresh processes; the table has the medians of their steps after the first.
"peak" is how much a process grows during these steps, above its weights, gradients and AdamW's state.

    python scripts/bench_chunks.py [--tokens 8192] [--chunks 8] [--json FILE]
    python scripts/bench_chunks.py --tokens 16384 --hidden 128 --steps 6 --reps 1
"""

from __future__ import annotations

import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from bench import machine
from bench.processes import run_job
from bench.report import MEGABYTE, table, write_json
from bench.runner import bench_parser, take_turns
from bench.work import Work, optimizer, update

from hf_gpipe import Pipeline

NUM_STAGES = 2


def rows(work: Work) -> list[dict[str, torch.Tensor]]:
    """One row of bytes for each step, of texts that differ."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    steps = range(1 + work.steps)
    pieces = [torch.tensor(list(text[step * work.tokens : (step + 1) * work.tokens]))[None] for step in steps]
    return [{"input_ids": piece, "labels": piece.clone()} for piece in pieces]


def measure(work: Work, chunks: int, recompute: str) -> dict[str, Any]:
    """One process's part: the losses, the median seconds of a step, and the growth of the process during the steps."""
    # As many blocks on each stage: embedding, norm and head take little time.
    partition = [work.layers // NUM_STAGES + 1, work.layers - work.layers // NUM_STAGES + 2]
    pipe = Pipeline(work.model(), NUM_STAGES, 1, "1f1b", recompute, partition=partition, sequence_chunks=chunks)
    step = optimizer(pipe.parameters())
    first, *others = rows(work)
    losses = [float(pipe.train_step(first))]
    # The state is there from now on, and gradients stay where they are.
    update(step)
    machine.reset_peak()
    before = machine.resident_bytes()
    seconds = []
    for row in others:
        start = time.perf_counter()
        losses.append(float(pipe.train_step(row)))
        update(step)
        seconds.append(time.perf_counter() - start)
    grown = machine.peak_bytes() - before
    return {"losses": losses, "seconds": statistics.median(seconds), "peak_bytes": grown}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, tokens=8192, chunks=8, layers=4, hidden=512, steps=1, reps=3)
    options = parser.parse_args(argv)
    work = Work(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=4 * options.hidden,
        vocabulary=256,
        rows=1,
        tokens=options.tokens,
        micro_batches=1,
        steps=options.steps,
    )
    if options.quick:
        work = work.tiny(vocabulary=256)
    settings = [(1, "none"), (options.chunks, "none"), (options.chunks, "stage")]
    cases = {case: partial(run_job, measure, (work, *case), NUM_STAGES, fork=options.quick) for case in settings}
    results = take_turns(cases, options)
    rows: list[dict[str, Any]] = []
    cells = []
    for (chunks, recompute), runs in results.items():
        seconds = statistics.median(max(part["seconds"] for part in run) for run in runs)
        peaks = [statistics.median(run[rank]["peak_bytes"] for run in runs) for rank in range(NUM_STAGES)]
        rows.append({"chunks": chunks, "recompute": recompute, "seconds": seconds, "peak_bytes": peaks, "runs": runs})
        sizes = [f"{peak / MEGABYTE:.0f}" for peak in peaks]
        times = f"{rows[0]['seconds'] / seconds:.2f}"
        shares = [f"{peak / whole:.2f}" for peak, whole in zip(peaks, rows[0]["peak_bytes"], strict=True)]
        losses = " ".join(f"{loss:.5f}" for loss in runs[0][0]["losses"])
        cells.append([chunks, recompute, f"{seconds:.2f}", times, *sizes, *shares, losses])
    header = [
        "chunks",
        "recompute",
        "s/step",
        "times as fast",
        "peak 0 MB",
        "peak 1 MB",
        "share 0",
        "share 1",
        "losses",
    ]
    print(table(header, cells))
    write_json(options.json, work=asdict(work), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
