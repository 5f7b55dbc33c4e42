"""The checks: what each runs in how many processes, on a machine with so many GPUs, and what it found."""

from __future__ import annotations

import getpass
import importlib
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from bench.processes import BACKEND_VARIABLE, JobFailedError, run_job

#: The kinds of checks of which a failure makes the command fail.
DECIDING = ("exactness", "hang", "order", "one GPU")
FAMILIES = ("llama", "marian", "t5")
VARIABLES = {BACKEND_VARIABLE: "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Result:
    """What a check found.

    Attributes:
        result: "passed", "failed" or "skipped".
        decides: whether its failure makes the command fail.
        seconds: that it took, with the start of its processes.
        figures: numbers, by name.
        message: why it failed or was skipped.
    """

    kind: str
    name: str
    result: str
    decides: bool
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @classmethod
    def of_error(cls, kind: str, name: str, seconds: float, error: JobFailedError) -> Result:
        """Processes that hang are a fault whatever the check is about."""
        decides = kind in DECIDING or "took too long" in str(error)
        return cls(kind, name, "failed", decides, seconds, {}, cause(str(error)))


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        kind: "exactness", "hang", "order" (of accesses to memory), "one GPU", "waiting", "plan", "capped", "gain" or
            "profile".
        name: unique.
        function: "module:function" of this package. It gets the job, and in each process returns `figures`,
            `problems` (a list of texts; empty: it passed) or `skipped` (a reason).
        job: its argument.
        num_processes: in which it runs, as one job.
        variables: of the environment of the processes.
    """

    kind: str
    name: str
    function: str
    job: dict[str, Any]
    num_processes: int = 1
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, limit_seconds: float) -> Result:
        """Run it in processes of its own. Whatever happens in them, a result is returned.

        On GPUs the processes are new: none may inherit a context of CUDA. On emulated devices they are forks.
        """
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
        how = {"fork": self.job["emulated"], "timeout_seconds": limit_seconds, "variables": VARIABLES | self.variables}
        start = time.monotonic()
        try:
            outcomes = run_job(function, (self.job,), self.num_processes, **how)
        except JobFailedError as error:
            return Result.of_error(self.kind, self.name, time.monotonic() - start, error)
        problems = list(dict.fromkeys(problem for one in outcomes for problem in one.get("problems", ())))
        skipped = next((one["skipped"] for one in outcomes if "skipped" in one), "")
        result = "failed" if problems else "skipped" if skipped else "passed"
        found = (outcomes[0].get("figures", {}), anonymous("; ".join(problems[:5]) or skipped))
        return Result(self.kind, self.name, result, self.kind in DECIDING, time.monotonic() - start, *found)


def checks_for(num_gpus: int, *, quick: bool, emulated: bool, profile: str | None = None) -> list[Check]:
    """All checks; with `profile` also one that writes named ranges and memory snapshots into this folder."""
    counts = [n for n in (1, 2, 4) if n <= num_gpus]
    several = [n for n in counts if n > 1]
    made: list[Check] = []

    def add(kind: str, name: str, function: str, n: int = 1, /, **values: Any) -> None:
        variables = values.pop("variables", {})
        made.append(Check(kind, name, function, {"quick": quick, "emulated": emulated} | values, n, variables))

    for dtype in ("float64", "bfloat16"):
        for n in counts:
            add("exactness", f"{dtype}, one process, {_gpus(n)}", "exact:exact", num_devices=n, dtype=dtype)
        for n in several:
            add("exactness", f"{dtype}, {n} processes", "exact:exact", n, num_devices=1, dtype=dtype)
        add("exactness", f"{dtype}, weights and activations on the host, chunks of rows", "exact:features", dtype=dtype)
    for name in ("autocast", "compiled", "kernels", "quantised"):
        add("exactness", f"{name}, one process, 1 GPU", f"precision:{name}")
    for n in several:
        add("exactness", f"float64, 2 replicas in {n} processes", "exact:replicas", n, dtype="float64")
    for n in several[-1:]:
        blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
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
    if profile is not None:
        n = counts[-1]
        add("profile", f"named ranges and memory, {_gpus(n)}", "profiling:profile", n, folder=profile)
    return made


def _gpus(n: int) -> str:
    return "1 GPU" if n == 1 else f"{n} GPUs"


def anonymous(text: str) -> str:
    """The text without names of this host and user, and without folders."""
    text = re.sub(r"(?<![\w.])(?:(?:~|\.{1,2})(?:/[\w.@+~-]+)*|(?:/[\w.@+~-]+)+)/([\w.@+~-]+)", r"\1", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = os.environ.get("USER", "")
    for name, stands_for in {socket.gethostname(): "HOST", socket.getfqdn(): "HOST", user: "USER"}.items():
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", stands_for, text)
    return text


def cause(text: str) -> str:
    """Why the processes failed, in one line: their limit or exit codes, and the last exceptions that they wrote."""
    first, *rest = text.splitlines()
    errors = [line.strip() for line in rest if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b", line)]
    return anonymous(": ".join([first.partition(": ")[2], *dict.fromkeys(errors[-3:])]))[:2000]
