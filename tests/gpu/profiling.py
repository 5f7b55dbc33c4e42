"""A step with ranges named by action, for Nsight Systems and as a trace, and a memory snapshot of each stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hf_gpipe import Pipeline
from tests.emulated_cuda.models import config_of
from tests.oracle import padded_batch, plain_model


def profile(job: dict[str, Any]) -> dict[str, Any]:
    """One stage a process: `trace-stageN.json` for ui.perfetto.dev, `memory-stageN.pickle` for torch's memory_viz."""
    rank, num_processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    folder = Path(job["folder"])
    pipe = _pipeline(num_processes)
    batch = padded_batch(pipe.adapter.config) if rank == 0 else None
    if not job["emulated"]:
        torch.cuda.memory._record_memory_history()
    pipe.train_step(batch)
    with torch.profiler.profile() as recorded:
        pipe.train_step(batch)
    recorded.export_chrome_trace(str(folder / f"trace-stage{rank}.json"))
    if not job["emulated"]:
        with torch.autograd.profiler.emit_nvtx():  # seen where Nsight Systems runs this
            pipe.train_step(batch)
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-stage{rank}.pickle"))
    found, missing = _ranges(pipe, recorded)
    if num_processes > 1:  # replicas have G too
        replicas = _pipeline(num_processes // 2, replicas=2)
        with torch.profiler.profile() as recorded:
            replicas.train_step(batch)
        more, lost = _ranges(replicas, recorded)
        found, missing = found | more, missing | lost
    problems = [f"no ranges named {sorted(missing)}"] if missing else []
    return {"figures": {"actions": len(found)}, "problems": problems}


def _pipeline(num_stages: int, replicas: int = 1) -> Pipeline:
    model = plain_model(config_of("llama"), dtype=torch.float32)
    return Pipeline(model, num_stages, 4, "1f1b", device="cuda", replicas=replicas)


def _ranges(pipe: Pipeline, recorded: Any) -> tuple[set[str], set[str]]:
    """The names of this process's actions that are ranges of a profile, and of those that are not."""
    actions = {f"action {action}" for action in pipe.schedule(4).actions[pipe.world.rank]}
    found = actions & {event.name for event in recorded.events()}
    return found, actions - found
