"""The checks: what each runs in how many processes, on a machine with so many GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: The kinds of checks of which a failure makes the command fail.
DECIDING = ("exactness", "hang", "order")
FAMILIES = ("llama", "marian", "t5")


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        kind: "exactness", "hang", "order" (of accesses to memory), "waiting", "speed" or "profile".
        name: unique.
        function: "module:function" of this package. It gets the job, and in each process returns `figures`,
            `problems` (a list of texts; empty: it passed) or `skipped` (a reason).
        job: its argument.
        num_processes: in which it runs, as one job.
        limit_seconds: after which they are ended, and the check has failed.
        variables: of the environment of the processes.
    """

    kind: str
    name: str
    function: str
    job: dict[str, Any]
    num_processes: int = 1
    limit_seconds: float = 300.0
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def decides(self) -> bool:
        """Whether its failure makes the command fail."""
        return self.kind in DECIDING


def checks_for(num_gpus: int, *, quick: bool, emulated: bool, limit_seconds: float) -> list[Check]:
    """All checks but those of `--profile`."""
    counts = [n for n in (1, 2, 4) if n <= num_gpus]
    several = [n for n in counts if n > 1]
    common: dict[str, Any] = {"quick": quick, "emulated": emulated}
    made: list[Check] = []

    def add(kind: str, name: str, function: str, n: int = 1, /, **values: Any) -> None:
        variables = values.pop("variables", {})
        made.append(Check(kind, name, function, common | values, n, limit_seconds, variables))

    for dtype in ("float64", "bfloat16"):
        for n in counts:
            add("exactness", f"{dtype}, one process, {_gpus(n)}", "exact:exact", num_devices=n, dtype=dtype)
        for n in several:
            add("exactness", f"{dtype}, {n} processes", "exact:exact", n, num_devices=1, dtype=dtype)
    for n in several:
        add("exactness", f"float64, 2 replicas in {n} processes", "exact:replicas", n, dtype="float64")
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    for n in several[-1:]:
        values: dict[str, Any] = {"dtype": "float64", "families": ("llama",), "variables": blocking}
        add("hang", f"CUDA_LAUNCH_BLOCKING=1, one process, {_gpus(n)}", "exact:exact", num_devices=n, **values)
        add("hang", f"CUDA_LAUNCH_BLOCKING=1, {n} processes", "exact:exact", n, num_devices=1, **values)
    add("hang", "a failed step in one process", "faults:failed_step", num_devices=counts[-1])
    for n in several[:1]:
        for fault in ("killed", "raised"):
            add("hang", f"a process of {n} {fault}", "faults:end_together", fault=fault, num_processes=n)
    for n in counts[:2]:
        sanitizer = {"TORCH_CUDA_SANITIZER": "1"}
        add("order", f"torch's sanitizer, {_gpus(n)}", "waits:sanitizer", num_devices=n, variables=sanitizer)
        add("waiting", f"synchronisations of a step, one process, {_gpus(n)}", "waits:waits", num_devices=n)
    for n in several[:1]:
        add("waiting", f"synchronisations of a step, {n} processes", "waits:waits", n, num_devices=1)
    return made


def profile_checks(num_gpus: int, folder: str, *, emulated: bool) -> list[Check]:
    """A step with named ranges, and a memory snapshot of each stage."""
    n = max(n for n in (1, 2, 4) if n <= num_gpus)
    job = {"folder": folder, "emulated": emulated}
    return [Check("profile", f"named ranges and memory, {_gpus(n)}", "profiling:profile", job, n)]


def selected(checks: Sequence[Check], words: Sequence[str] | None) -> list[Check]:
    """Those whose kind or name has one of the words; all without words."""
    return [one for one in checks if not words or any(word in f"{one.kind}: {one.name}" for word in words)]


def _gpus(n: int) -> str:
    return "1 GPU" if n == 1 else f"{n} GPUs"
