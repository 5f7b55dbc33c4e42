"""Two processes on one GPU, which NCCL allows since 2.30: its messages, ties, replicas, aborts and time limits.

NCCL's transports between GPUs and speed cannot be seen so.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_gpipe import Pipeline
from tests.emulated_cuda.models import config_of
from tests.gpu.checks import FAMILIES, Check
from tests.gpu.exact import Comparison
from tests.oracle import padded_batch, plain_model, run_plain

#: The first version of NCCL with several ranks on a GPU.
NEEDED = (2, 30)
#: Each rank needs channels of its own, of which one GPU has few.
MODE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
_PROCESSES = 2
#: Ways to train in two processes whose messages and sums no schedule has.
_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"num_stages": 1, "replicas": 2, "schedule": "1f1b", "recompute": "stage"}),
    ("llama", {"num_stages": 2, "schedule": "1f1b", "recompute": "none", "sequence_chunks": 3}),
    ("llama", {"num_stages": 1, "tensor_parallel": 2, "schedule": "gpipe", "recompute": "stage"}),
    ("llama", {"num_stages": 4, "schedule": "round_robin", "recompute": "stage", "offload_weights": "all"}),
)


def checks(nccl: str, *, quick: bool, emulated: bool) -> list[Check]:
    """The checks, whose processes share a GPU.

    Args:
        nccl: a file of NCCL to load in place of torch's; "": torch's own.
    """
    job: dict[str, Any] = {"quick": quick, "emulated": emulated, "shared": True, "dtype": "float64", "num_devices": 1}
    job["nccl"] = nccl
    variables = MODE if emulated else MODE | _daemon()
    if nccl:
        variables = variables | {"LD_PRELOAD": nccl}
    made = [("every schedule, ties", "every_schedule"), ("replicas, chunks, divided and dealt layers", "ways")]
    made.append(("ZeRO-1", "zero"))
    found = [Check("one GPU", name, f"one_gpu:{function}", job, _PROCESSES, variables) for name, function in made]
    for fault in ("killed", "raised", "blocked"):
        faulty = job | {"fault": fault, "num_processes": _PROCESSES}
        found.append(Check("one GPU", f"a process of 2 {fault}", "one_gpu:fault", faulty, 1, variables))
    return found


def every_schedule(job: dict[str, Any]) -> dict[str, Any]:
    """Every schedule, with ties over both processes; the figures have the communicators of the last pipeline."""
    from tests.gpu.exact import exact

    return _unless_old(job) or _with_communicators(exact(job))


def ways(job: dict[str, Any]) -> dict[str, Any]:
    """Replicas, chunks of rows, divided layers and dealt stages."""
    if old := _unless_old(job):
        return old
    torch.cuda.set_device(0)
    comparison = Comparison(job["dtype"])
    for family, options in _WAYS:
        comparison.add(family, "cuda:0", **options)
    return _with_communicators(comparison.report())


def zero(job: dict[str, Any]) -> dict[str, Any]:
    """A step of AdamW whose state is sharded over two replicas, beside the plain model's."""
    if old := _unless_old(job):
        return old
    torch.cuda.set_device(0)
    problems, worst = [], 0.0
    for family in FAMILIES[: 1 if job["quick"] else None]:
        plain = plain_model(config_of(family)).to("cuda:0")
        batch = padded_batch(plain.config)
        run_plain(plain, {name: tensor.to("cuda:0") for name, tensor in batch.items()}, 4)
        torch.optim.AdamW(plain.parameters(), lr=1e-2).step()
        how: dict[str, Any] = {"replicas": 2, "zero": 1, "schedule": "1f1b", "recompute": "stage"}
        pipe = Pipeline(plain_model(config_of(family)), 1, 4, device="cuda:0", **how)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        pipe.shard_optimizer(optimizer)
        pipe.train_step(batch if pipe.world.rank == 0 else None)
        optimizer.step()
        expected = dict(plain.named_parameters())
        error = max(float((p - expected[name]).abs().max()) for name, p in pipe.named_parameters())
        worst = max(worst, error)
        # AdamW divides a gradient by its size, so the rounding of a small one is seen.
        if not error <= 1e-7:
            problems.append(f"{family}: a weight is off by {error:.1e}")
    return {"figures": {"largest difference": worst}, "problems": problems}


def fault(job: dict[str, Any]) -> dict[str, Any]:
    """A process is killed, fails, or sends nothing more, and the other ends."""
    from tests.gpu.faults import end_together

    return _unless_old(job) or end_together(job)


def _unless_old(job: dict[str, Any]) -> dict[str, Any] | None:
    """Why the check is skipped, if NCCL is too old; the version is that of the library that this process has loaded."""
    version = torch.cuda.nccl.version()
    if job["emulated"] or tuple(version[:2]) >= NEEDED:
        return None
    found, needed = (".".join(map(str, one)) for one in (version, NEEDED))
    return {"skipped": f"NCCL {found} gives each rank a GPU; give the libnccl.so.2 of {needed} or newer by --nccl FILE"}


def _with_communicators(found: dict[str, Any]) -> dict[str, Any]:
    """Add the groups on NCCL that this process has made, for all pipelines together, by their number of ranks."""
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if "nccl" in backend]
    sizes = [dist.get_world_size(group) for group in groups]
    found["figures"] |= {"communicators": len(sizes), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


@cache
def _daemon() -> dict[str, str]:
    """Start a private MPS daemon, which ends with this process; the variables of its clients. None where it fails."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return {}
    folder = tempfile.mkdtemp(prefix="hf_gpipe-mps-")
    variables = {f"CUDA_MPS_{name}_DIRECTORY": str(Path(folder, name.lower())) for name in ("PIPE", "LOG")}
    for path in variables.values():
        Path(path).mkdir()

    def control(*words: str, said: str = "") -> bool:
        command, everything = ["nvidia-cuda-mps-control", *words], os.environ | variables
        try:
            done = subprocess.run(command, input=said, env=everything, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return False
        return done.returncode == 0

    if not control("-d"):
        return {}
    atexit.register(control, said="quit\n")
    return variables | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "45"}
