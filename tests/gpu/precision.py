"""Half precision, compiled blocks and quantised weights on a GPU, beside plain transformers, peft and bitsandbytes."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_gpipe import Pipeline
from tests.emulated_cuda.models import config_of
from tests.gpu.checks import FAMILIES
from tests.gpu.exact import NUM_MICRO_BATCHES, RECOMPUTE, Comparison
from tests.oracle import padded_batch, plain_model, run_pipeline, run_plain, run_scaled

#: A loss in float16 is scaled, so that small gradients are not rounded to zero.
_SCALES = {torch.bfloat16: 1.0, torch.float16: 1024.0}


def autocast(job: dict[str, Any]) -> dict[str, Any]:
    """Weights in float32 and a forward in half precision; in float16 with a scaled loss."""
    comparison = Comparison("bfloat16")
    for dtype, scale in _SCALES.items():
        for family in FAMILIES[: 1 if job["quick"] else None]:
            model = plain_model(config_of(family), dtype=torch.float32)
            batch = {name: tensor.to("cuda") for name, tensor in padded_batch(model.config).items()}
            expected = run_plain(model.to("cuda"), batch, NUM_MICRO_BATCHES, dtype, scale)
            for recompute in RECOMPUTE:
                how = {"recompute": recompute, "schedule": "1f1b", "autocast": dtype}
                model = plain_model(config_of(family), dtype=torch.float32)
                pipe = Pipeline(model, 2, NUM_MICRO_BATCHES, device="cuda:0", **how)
                found = run_scaled(pipe, padded_batch(model.config), scale)
                comparison.judge(f"{family} {dtype} recompute={recompute}", [found], expected)
    return comparison.report()


def compiled(job: dict[str, Any]) -> dict[str, Any]:
    """Blocks that torch.compile compiled, for each mode of recomputation anew."""
    if job["emulated"]:
        return {"skipped": "kernels for CUDA cannot be compiled for an emulated device"}
    comparison = Comparison("float64")
    for recompute in RECOMPUTE[: 1 if job["quick"] else 2]:
        comparison.add("llama", "cuda:0", num_stages=2, schedule="1f1b", recompute=recompute, torch_compile=True)
    return comparison.report()


def lacking(job: dict[str, Any], *packages: str) -> str:
    """Return why packages with kernels for CUDA, the last of them, cannot be used here; empty if they can."""
    if missing := [name for name in packages if find_spec(name) is None]:
        return f"{' and '.join(missing)} must be installed"
    return f"{packages[-1]} has no emulated device" if job["emulated"] else ""


def kernels(job: dict[str, Any]) -> dict[str, Any]:
    """Kernels of liger-kernel, for each mode of recomputation; and in float32 those of a tiny clone."""
    if reason := lacking(job, "liger_kernel", "triton"):
        return {"skipped": reason}
    comparison = Comparison("bfloat16")
    for recompute in RECOMPUTE[: 1 if job["quick"] else None]:
        how = {"num_stages": 2, "schedule": "1f1b", "recompute": recompute}
        comparison.add("llama", "cuda:0", **how, use_liger_kernel=True)
    return comparison.report()


def quantised(job: dict[str, Any]) -> dict[str, Any]:
    """LoRA on weights of 4 and 8 bits."""
    if reason := lacking(job, "peft", "bitsandbytes"):
        return {"skipped": reason}
    from tests import qlora

    comparison = Comparison("bfloat16")
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-gpu-") as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(qlora.config()).save_pretrained(folder)
        for kind in ("nf4", "nf4+", "fp4", "int8")[: 1 if job["quick"] else None]:
            for recompute in RECOMPUTE:
                pipe = qlora.make(Path(folder), kind, 2, recompute=recompute, device="cuda:0")
                found = run_pipeline(pipe, padded_batch(qlora.config()))
                model = qlora.plain_model(Path(folder), kind, device="cuda:0")
                expected = qlora.expected_step(model, qlora.adapters_of(pipe))
                comparison.judge(f"{kind} recompute={recompute}", [found], expected)
    return comparison.report()
