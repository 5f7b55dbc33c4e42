"""Models of 7 and 14 billion random weights in 24 GB of a GPU: tokens a second, peaks of the GPU and of the process.

LLMQ (arXiv 2512.15306) and RoundPipe (arXiv 2604.27085) have figures of cards of this size.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import psutil
import torch
from bench.machine import status_bytes
from bench.models import llama
from bench.planned import Case, tiny, train_pipeline
from transformers import AutoModelForCausalLM

from tests.gpu.checks import Check

_GIB = 2**30
CAP_BYTES = 24 * 10**9
#: A row has as many tokens as in LLMQ's figures.
_ROWS, _TOKENS, _STEPS = 32, 1024, 3
#: Width, blocks, feed-forward, vocabulary, heads, key-value heads: of Qwen 2.5.
_SIZES = {"7B": (3584, 28, 18944, 152064, 28, 4), "14B": (5120, 48, 13824, 152064, 40, 8)}
#: Bytes for each weight that is trained in CPU memory: itself, its gradient, and AdamW's two values, in bfloat16.
_HOST_BYTES = 8


def cases() -> Iterator[Case]:
    """Full fine-tuning with all weights in CPU memory, and LoRA with as many as fit on the GPU."""
    for size, (width, blocks, inner, vocabulary, heads, key_values) in _SIZES.items():
        config = llama(
            *(width, blocks, vocabulary, inner),
            **{"heads": heads, "num_key_value_heads": key_values, "max_position_embeddings": _TOKENS},
        )
        given: dict[str, Any] = {"rows": _ROWS, "source": _TOKENS, "target": _TOKENS, "num_micro_batches": 8}
        given |= {"num_processes": 1, "dtype": "bfloat16", "device": "cuda"}
        visits = {"num_stages": blocks // 4, "schedule": "breadth_first", "recompute": "stage"}
        resident = {"num_stages": 1, "schedule": "gpipe", "recompute": "block"}
        frozen, everything = ({"offload_weights": name} for name in ("frozen", "all"))
        if size == "7B":
            yield Case(f"{size}, LoRA", config, **given, **resident, training="lora")
        yield Case(f"{size}, LoRA, weights visit", config, **given, **visits, training="lora", others=frozen)
        yield Case(f"{size}, all weights visit", config, **given, **visits, others=everything)


def checks(*, quick: bool, emulated: bool) -> list[Check]:
    """A check for each case, with `quick` of the first alone."""
    job = {"quick": quick, "emulated": emulated}
    return [
        Check("capped", case.name, "capped:train", job | {"case": case}) for case in [*cases()][: 1 if quick else None]
    ]


def train(job: dict[str, Any]) -> dict[str, Any]:
    """A few steps of a case under the cap."""
    case: Case = job["case"]
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    if job["emulated"]:
        case = tiny(replace(case, num_stages=min(case.num_stages, 3)))
    else:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(case.config).parameters())
        needed = size * (_HOST_BYTES if case.training == "full" else 2)
        if (free := psutil.virtual_memory().available) < 1.1 * needed:
            return {"skipped": f"it needs {needed / _GIB:.0f} GiB of CPU memory, and {free / _GIB:.0f} are free"}
        torch.set_num_threads(psutil.cpu_count(logical=False) or 1)
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-gpu-") as folder:
        with device:  # where random numbers take no time
            model = AutoModelForCausalLM.from_config(case.config, dtype=getattr(torch, case.dtype))
        model.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        if not job["emulated"]:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / total))
        torch.cuda.reset_peak_memory_stats(device)
        _, seconds = train_pipeline(replace(case, folder=folder), _STEPS)
    if job["emulated"]:
        return {}
    figures = {"tokens per second": case.rows * case.source / median(seconds), "seconds a step": median(seconds)}
    figures |= {"peak GiB": torch.cuda.max_memory_reserved(device) / _GIB, "CPU GiB": status_bytes("VmHWM") / _GIB}
    return {"figures": figures, "problems": []}
