"""One long row in chunks of tokens against whole rows: seconds of a step, and memory of each process.

Two processes hold a stage each, joined by gloo, with one thread each, under "1f1b" with recompute "stage". The runs
take turns, each in fresh processes; the table has their medians. "peak" is how much a process grows during a step,
above its weights and gradients, with the temporaries of the row's logits in the last stage.

    python scripts/bench_chunks.py [--tokens 8192] [--chunks 8] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bench import machine
from bench.processes import run_job
from bench.report import MEGABYTE, table, write_json
from bench.runner import bench_parser, take_turns
from bench.work import Work

from hf_gpipe import Pipeline

NUM_STAGES = 2


def measure(work: Work, chunks: int) -> dict[str, float]:
    """One process's part: the loss, the median seconds of a step, and the growth of the process during a step."""
    # As many blocks on each stage: embedding, norm and head take little time.
    partition = [work.layers // NUM_STAGES + 1, work.layers - work.layers // NUM_STAGES + 2]
    pipe = Pipeline(work.model(), NUM_STAGES, 1, "1f1b", "stage", partition=partition, sequence_chunks=chunks)
    batch = work.batch()
    # Gradients are there from now on, so that no later step adds them.
    loss = float(pipe.train_step(batch))
    machine.reset_peak()
    before = machine.resident_bytes()
    seconds = []
    for _ in range(work.steps):
        start = time.perf_counter()
        pipe.train_step(batch)
        seconds.append(time.perf_counter() - start)
    return {"loss": loss, "seconds": statistics.median(seconds), "peak_bytes": machine.peak_bytes() - before}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, tokens=8192, chunks=8, layers=4, hidden=512, steps=1, reps=3)
    options = parser.parse_args(argv)
    work = Work(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=4 * options.hidden,
        vocabulary=512,
        rows=1,
        tokens=options.tokens,
        micro_batches=1,
        steps=options.steps,
    )
    if options.quick:
        work = work.tiny()
    cases = {k: partial(run_job, measure, (work, k), NUM_STAGES, fork=options.quick) for k in (1, options.chunks)}
    found = take_turns(cases, options)
    rows: list[dict[str, Any]] = []
    cells = []
    for chunks, runs in found.items():
        seconds = statistics.median(max(part["seconds"] for part in run) for run in runs)
        peaks = [statistics.median(run[rank]["peak_bytes"] for run in runs) for rank in range(NUM_STAGES)]
        rows.append({"chunks": chunks, "seconds": seconds, "peak_bytes": peaks, "runs": runs})
        sizes = [f"{peak / MEGABYTE:.0f}" for peak in peaks]
        times = f"{rows[0]['seconds'] / seconds:.2f}"
        shares = [f"{peak / whole:.2f}" for peak, whole in zip(peaks, rows[0]["peak_bytes"], strict=True)]
        loss = f"{runs[0][0]['loss']:.5f}"
        cells.append([chunks, f"{seconds:.2f}", times, *sizes, *shares, loss])
    header = ["chunks", "s/step", "times as fast", "peak 0 MB", "peak 1 MB", "share 0", "share 1", "loss"]
    print(table(header, cells))
    write_json(options.json, work=asdict(work), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
