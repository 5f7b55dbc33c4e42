"""The head's loss in chunks of positions beside whole logits: time and memory of a last stage over the vocabulary.

The stage has Llama blocks, the norm and the head, and runs one F and B of a micro-batch in float32. "MB" is how much
its process grows in a step, beyond weights and gradients, which are there before. "chunks" is what a pipeline runs;
"whole" makes the logits (B, T, V) in F and keeps their gradient until B.

    python scripts/bench_head.py [--json FILE]        about 15 minutes
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from bench import machine
from bench.models import llama
from bench.processes import run_job
from bench.report import MEGABYTE, Spread, paired, table, write_json
from bench.runner import bench_parser, take_turns

from hf_gpipe.adapters import adapter_for
from hf_gpipe.model.assembly import assemble
from hf_gpipe.planner.costs.tracing import context_of
from hf_gpipe.runtime.micro_batch import MicroBatch
from hf_gpipe.runtime.stage import Stage

HOW = ("whole", "chunks")
LOSS_TOLERANCE = 1e-4
QUICK = {"width": 16, "rows": 2, "tokens": 8, "steps": 1}

Runs = dict[str, list[dict[str, Any]]]


def measure(job: dict[str, int], how: str) -> dict[str, Any]:
    """In a process of its own: the seconds of every step, the growth of the process in one, and the loss."""
    cpu, length = torch.device("cpu"), job["tokens"]
    # The first block is on the stage before.
    config = llama(job["width"], job["blocks"] + 1, job["vocabulary"], max_position_embeddings=length, pad_token_id=0)
    adapter = adapter_for(config)
    model = assemble(adapter, range(2, len(adapter.layers)), None, cpu)
    if how == "whole":
        model.deferred_logits = lambda: None  # type: ignore[method-assign]  # of this one stage
    stage = Stage(model, lambda boundary: {"hidden": True})
    torch.manual_seed(0)
    ids = torch.randint(1, job["vocabulary"], (job["rows"], length))
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    context = context_of(model, MicroBatch.alone(inputs))

    def step() -> float:
        loss = stage.forward(context, keep_graph=True)["loss"]
        stage.backward(0, {})
        return float(loss)

    step()  # from now on the gradients are there
    machine.reset_peak()
    before = machine.resident_bytes()
    loss = step()
    grown, seconds = machine.peak_bytes() - before, []
    for _ in range(job["steps"]):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "grown_bytes": grown, "loss": loss}


def row(vocabulary: int, runs: Runs) -> list[str]:
    seconds = {how: [median(run["seconds"]) for run in runs[how]] for how in HOW}
    sizes = {how: [run["grown_bytes"] / MEGABYTE for run in runs[how]] for how in HOW}
    return [
        *(str(vocabulary), *(Spread.of(seconds[how]).text(3) for how in HOW)),
        *(paired(seconds["chunks"], seconds["whole"]).text(), *(Spread.of(sizes[how]).text(0) for how in HOW)),
        # A tiny step may find room in memory that is there.
        paired(sizes["chunks"], sizes["whole"]).text(3) if all(sizes["whole"]) else "-",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, width=512, blocks=1, rows=4, tokens=512, steps=3, reps=5)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_768, 131_072], metavar="V")
    options = parser.parse_args(argv)
    job = {name: getattr(options, name) for name in ("width", "blocks", "rows", "tokens", "steps")}
    vocabularies, job = ([64, 128], job | QUICK) if options.quick else (options.vocabularies, job)
    rows, code, cells = [], 0, []
    for size in vocabularies:
        job = job | {"vocabulary": size}
        run = partial(run_job, measure, num_processes=1, fork=options.quick, timeout_seconds=1800)
        results = take_turns({how: partial(run, arguments=(job, how)) for how in HOW}, options)
        runs = {how: [part for (part,) in several] for how, several in results.items()}
        cells.append(row(size, runs))
        rows.append({**job, "runs": runs})
        losses = [part["loss"] for several in runs.values() for part in several]
        if not max(losses) - min(losses) <= LOSS_TOLERANCE * abs(losses[0]):
            print(f"V = {size}: the losses are from {min(losses)} to {max(losses)}", file=sys.stderr)
            code = 1
    print(table(["V", "whole, seconds", "chunks, seconds", "ratio", "whole, MB", "chunks, MB", "ratio"], cells))
    write_json(options.json, rows=rows)
    return code


if __name__ == "__main__":
    sys.exit(main())
