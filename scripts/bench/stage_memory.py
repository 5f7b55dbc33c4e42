"""The memory that one process of a pipeline keeps during a step."""

from __future__ import annotations

import os
from typing import Any

from bench import machine
from bench.processes import Job
from bench.saved_bytes import SavedBytes
from bench.work import Work
from hf_gpipe import Pipeline
from hf_gpipe.runtime.micro_batch import Context

#: The middle one both receives and sends hidden states, and has neither embedding nor head.
NUM_STAGES = 3


def measure_process(job: Job) -> dict[str, int]:
    """One process's part: bytes saved for backward at their peak, and the growth of the process during a step."""
    work = Work(**job["work"])
    blocks = work.layers // NUM_STAGES
    pipe = Pipeline(
        work.model(),
        num_stages=NUM_STAGES,
        num_micro_batches=work.micro_batches,
        schedule="gpipe",
        recompute=job["recompute"],
        partition=[1 + blocks, blocks, blocks + 2],
    )
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
