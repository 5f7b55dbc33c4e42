"""Runs a check in processes of its own with a time limit, so that none can hang or stop the others."""

from __future__ import annotations

import getpass
import importlib
import os
import re
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.processes import BACKEND_VARIABLE, JobFailedError, run_job

from gpu_check.checks import Check


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(check: Check, *, emulated: bool) -> Result:
    """Run a check. Whatever happens in it, a result is returned."""
    start = time.monotonic()
    try:
        outcomes = call(check, emulated=emulated)
    except JobFailedError as error:
        # Processes that hang are a fault whatever the check is about.
        hangs = "took too long" in str(error)
        return Result(
            check.kind, check.name, "failed", check.decides or hangs, time.monotonic() - start, {}, cause(str(error))
        )
    seconds = time.monotonic() - start
    problems = list(dict.fromkeys(problem for one in outcomes for problem in one.get("problems", ())))
    skipped = next((one["skipped"] for one in outcomes if "skipped" in one), "")
    result = "failed" if problems else "skipped" if skipped else "passed"
    message = anonymous("; ".join(problems[:5]) or skipped)
    return Result(check.kind, check.name, result, check.decides, seconds, outcomes[0].get("figures", {}), message)


def call(check: Check, *, emulated: bool) -> list[dict[str, Any]]:
    """What the check's function returned in each process.

    On GPUs the processes are new: none may inherit a context of CUDA. On emulated devices they are forks of this one.
    """
    module, _, name = check.function.partition(":")
    function = getattr(importlib.import_module(f"gpu_check.{module}"), name)
    variables = {BACKEND_VARIABLE: "cpu:gloo,cuda:nccl", **check.variables}
    return run_job(
        function,
        check.job,
        check.num_processes,
        fork=emulated,
        timeout_seconds=check.limit_seconds,
        variables=variables,
    )


def anonymous(text: str) -> str:
    """The text without names of this host and user, and without folders."""
    text = re.sub(r"(?<![\w.])(?:(?:~|\.{1,2})(?:/[\w.@+~-]+)*|(?:/[\w.@+~-]+)+)/([\w.@+~-]+)", r"\1", text)
    names = {socket.gethostname(): "HOST", socket.getfqdn(): "HOST", _user(): "USER"}
    for name, stands_for in names.items():
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", stands_for, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return os.environ.get("USER", "")


def cause(text: str) -> str:
    """Why the processes failed, in one line: their limit or exit codes, and the last exceptions that they wrote."""
    first, *rest = text.splitlines()
    errors = [line.strip() for line in rest if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b", line)]
    complaint = first.rpartition("}: ")[2]
    return anonymous(": ".join([complaint, *dict.fromkeys(errors[-3:])]))[:2000]
