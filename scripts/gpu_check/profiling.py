"""A step with ranges named by action, for Nsight Systems and as a trace, and a memory snapshot of each stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hf_gpipe import Pipeline
from tests.emulated_cuda.comparing import config_of
from tests.oracle import padded_batch, plain_model


def profile(job: dict[str, Any]) -> dict[str, Any]:
    """One stage a process: `trace-stageN.json` for ui.perfetto.dev, `memory-stageN.pickle` for torch's memory_viz."""
    rank, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    folder = Path(job["folder"])
    pipe = Pipeline(plain_model(config_of("llama"), dtype=torch.float32), num_processes, 4, "1f1b", device="cuda")
    batch = padded_batch(pipe.adapter.config) if rank == 0 else None
    if not job["emulated"]:
        torch.cuda.memory._record_memory_history()
    pipe.train_step(batch)
    with torch.profiler.profile() as recorded:
        pipe.train_step(batch)
    recorded.export_chrome_trace(str(folder / f"trace-stage{rank}.json"))
    actions = {f"action {action}" for action in pipe.schedule(4).actions[rank]}
    found = actions & {event.name for event in recorded.events()}
    problems = [f"no ranges named {sorted(actions - found)}"] if found != actions else []
    if not job["emulated"]:
        with torch.autograd.profiler.emit_nvtx():  # seen where Nsight Systems runs this
            pipe.train_step(batch)
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-stage{rank}.pickle"))
    return {
        "figures": {"actions": len(found)},
        "problems": problems,
    }
