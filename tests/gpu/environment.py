"""The environment that the figures depend on. No names of hosts or users, and no paths."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch
import transformers

import hf_gpipe

VARIABLES = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def describe(emulated: bool) -> dict[str, Any]:
    """Versions, GPUs, and what joins them; `gpus` is empty where torch finds none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {
        **{"hf_gpipe": hf_gpipe.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "driver": _driver() if count and not emulated else None,
        "cuda": torch.version.cuda,
        "nccl": None,
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)},
        "gpus": [],
    }
    if not count:
        return found
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for index in range(count):
        one = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found["gpus"].append(
            {
                "name": one.name,
                "memory_bytes": total,
                "free_bytes": free,
                "capability": f"{one.major}.{one.minor}",
                "multiprocessors": one.multi_processor_count,
            }
        )
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    found["peer_access"] = peers
    found["links"] = _links(count) if count > 1 and not emulated else None
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The environment as text."""
    versions = ("hf_gpipe", "torch", "cuda", "driver", "nccl", "transformers", "python", "system", "cores")
    text = [", ".join(f"{name} {found[name]}" for name in versions if found.get(name) is not None)]
    for number, gpu in enumerate(found["gpus"]):
        text.append(
            f"GPU {number}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB, "
            f"{gpu['free_bytes'] / 2**30:.1f} free, capability {gpu['capability']}"
        )
    count = len(found["gpus"])
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    if pairs:
        without = [f"{a}-{b}" for a, b in pairs if not (found["peer_access"][a][b] and found["peer_access"][b][a])]
        text.append(f"peer access: {'all pairs' if not without else f'not {chr(44).join(without)}'}; {_joined(found)}")
    return text


def _joined(found: dict[str, Any]) -> str:
    if found["links"] is None:
        return "links: not known"
    return "links: " + (", ".join(found["links"]) or "PCIe, as far as torch says")


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _links(count: int) -> list[str] | None:
    """The pairs with NVLink; None where torch does not say. torch has no public function for it."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return [f"{a}-{b} NVLink" for a in range(count) for b in range(a + 1, count) if matrix[a][b]]
    except (ImportError, AttributeError, RuntimeError, IndexError):
        return None
