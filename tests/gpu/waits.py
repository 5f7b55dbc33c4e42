"""How often the host waits for a device, and whether all accesses to a device's memory are in a given order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_gpipe import Pipeline
from hf_gpipe.modes.host_graphs import copies as offload
from tests.emulated_cuda.models import config_of
from tests.oracle import padded_batch, plain_model

#: Of a step of a dense model, in each process (docs/speed.md).
MOST_SYNCHRONISATIONS = 1


def waits(job: dict[str, Any]) -> dict[str, Any]:
    """The synchronisations of the third step, with clipping and an optimizer."""
    pipe = _pipeline(job, torch.float32)
    optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        pipe.clip_grad_norm_(float(norm) / 2, norm)
        optimizer.step()

    batch = padded_batch(pipe.adapter.config)
    for _ in range(3):
        pipe.zero_grad()
        with synchronisations(job["emulated"]) as found:
            pipe.train_step(batch if pipe.world.rank == 0 else None, update=update)
    problems = []
    if len(found) > MOST_SYNCHRONISATIONS:
        problems.append(f"{len(found)} synchronisations in a step: {'; '.join(found[:5])}")
    return {"figures": {"synchronisations": len(found), "bound": MOST_SYNCHRONISATIONS}, "problems": problems}


def sanitizer(job: dict[str, Any]) -> dict[str, Any]:
    """Short steps under torch's own sanitizer; its findings are raised where they are found."""
    if job["emulated"]:
        return {"skipped": "tests/emulated_cuda/test_happens_before.py has this for emulated devices"}
    import torch.cuda._sanitizer as csan

    if not csan.cuda_sanitizer.enabled:
        return {"problems": ["TORCH_CUDA_SANITIZER=1 did not enable torch's sanitizer"]}
    offload.SMALLEST_BYTES = 1  # what these models save is small
    visits = {"num_stages": 4, "recompute": "stage", "offload_weights": "all"}
    ways: tuple[dict[str, Any], ...] = (
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "recompute": "host"},
        {"schedule": "breadth_first"} | visits,
        {"schedule": "round_robin"} | visits,
    )
    for way in ways:
        pipe = _pipeline(job, torch.float32, **way)
        for _ in range(2):
            pipe.train_step(padded_batch(pipe.adapter.config))
    torch.cuda.synchronize()
    return {"figures": {"steps": 2 * len(ways)}, "problems": []}


@contextmanager
def synchronisations(emulated: bool) -> Iterator[list[str]]:
    """Context manager that notes where the host waits for a device."""
    found: list[str] = []
    if emulated:
        from tests.emulated_cuda.device import counting

        with counting() as counts:
            yield found
        found += [str(place) for place in counts.synchronisations]
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        if "synchronizing CUDA operation" in str(one.message):
            found.append(f"{one.filename}:{one.lineno}")


def _pipeline(job: dict[str, Any], dtype: torch.dtype, **options: Any) -> Pipeline:
    num_processes, num_devices = int(os.environ["WORLD_SIZE"]), job["num_devices"]
    device: Any = "cuda" if num_processes > 1 else [f"cuda:{index}" for index in range(num_devices)]
    given = {"num_stages": max(2, num_processes, num_devices), "schedule": "1f1b"} | options
    model = plain_model(config_of("llama"), dtype=dtype)
    model.set_attn_implementation("sdpa")  # with eager, transformers 5.17 copies a constant to the device for each mask
    return Pipeline(model, num_micro_batches=2, device=device, **given)
