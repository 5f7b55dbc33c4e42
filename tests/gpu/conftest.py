"""Checks hf_gpipe on the GPUs of this machine. Prints one table, and writes gpu_check.json to attach to an issue.

`bash scripts/gpu_check.sh` runs `pytest -m gpu tests/gpu`; docs/gpu.md says how to read the result. Nothing can hang:
every check runs in processes of its own with a time limit. Exit codes: 0; 1 where a check of exactness, of faults and
hangs, or of the order of accesses failed, or any check ran into its limit; 2 where there is no GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NO_GPU = (
    "error: torch finds no CUDA device here. Install a CUDA build of torch (docs/gpu.md), or run the checks on "
    "emulated devices: bash scripts/gpu_check.sh --emulated"
)
EMULATED = """\
EMULATED: CUDA devices on the CPU's memory, and a stand-in for NCCL (tests/emulated_cuda/README.md).
Real here: values, hf_gpipe's code for CUDA, the order of its messages, its faults.
Not shown: asynchrony, CUDA's rounding and kernels, NCCL, the allocator, speed."""
#: Options of pytest with their defaults.
OPTIONS: dict[str, tuple[Any, str]] = {
    "quick": (False, "fewer combinations, and speed with one repetition"),
    "emulated": (False, "on emulated devices: no GPU, no figures of speed"),
    "only": ([], "checks whose kind or name has this word; may be given several times"),
    "gpus": (0, "use at most this many"),
    "limit": (300.0, "seconds after which a check has failed"),
    "reps": (5, "repetitions of each figure of speed"),
    "one_gpu": (False, "two processes on one GPU over NCCL, and no other checks"),
    "half_hour": (False, "all that a GPU for half an hour is used for, most important first"),
    "minutes": (0.0, "end after this time, and keep what there is: the same command goes on with the other checks"),
    "nccl": ("", "the libnccl.so.2 that these load in place of torch's (scripts/nccl_pieces.py)"),
    "profile": ("", "also write memory snapshots and a trace into this folder"),
    "output": (".", "the folder of gpu_check.json"),
}
_STATE = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "checks of GPUs (-m gpu)")
    for name, (default, text) in OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            group.addoption(option, action="store_true", help=text)
        else:
            how = {"action": "append"} if isinstance(default, list) else {"type": type(default)}
            group.addoption(option, default=default, help=text, **how)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs GPUs, or --emulated; see tests/gpu/conftest.py")
    sys.path.append(str(ROOT / "scripts"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Without a GPU there is nothing to collect."""
    if session.config.getoption("markexpr") == "gpu":
        state_of(session.config)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only where GPUs are asked for."""
    return True if config.getoption("markexpr") != "gpu" else None


def state_of(config: pytest.Config) -> dict[str, Any]:
    """The options, the environment, the checks and comparisons to be made, and the results so far."""
    if _STATE in config.stash:
        return config.stash[_STATE]
    import torch

    given = {name: config.getoption(name, default) for name, (default, _) in OPTIONS.items()}
    emulated, quick = given["emulated"], given["quick"]
    if not emulated and not torch.cuda.device_count():
        pytest.exit(NO_GPU, returncode=2)
    from bench.processes import run_job

    from tests.gpu import environment
    from tests.gpu.checks import VARIABLES, checks_for

    if emulated:  # the processes of checks are forks of this one: what is imported here, none of them imports again
        from tests.emulated_cuda.processes import preload

        preload()
    how = {"fork": emulated, "timeout_seconds": 120, "variables": VARIABLES}
    (found,) = run_job(environment.describe, (emulated,), 1, **how)
    num_gpus = min(len(found["gpus"]), given["gpus"] or (2 if emulated else 4))
    if not num_gpus:
        pytest.exit(NO_GPU, returncode=2)
    from tests.gpu import (
        capped,
        gains,
        half_hour,
        one_gpu,
        planned,
        speed,
    )  # they import most of hf_gpipe, which takes seconds

    if given["profile"]:
        Path(given["profile"]).mkdir(parents=True, exist_ok=True)
    folder = str(Path(given["profile"]).resolve()) if given["profile"] else None
    few = quick or given["half_hour"]
    checks: list[Any] = checks_for(num_gpus, quick=few, emulated=emulated, profile=folder)
    checks += planned.checks(speed.fitting(found, num_gpus, emulated=emulated), quick=quick, emulated=emulated)
    checks += speed.comparisons(found, num_gpus, quick=quick, emulated=emulated, with_others=given["half_hour"])
    if given["one_gpu"] or given["half_hour"]:
        checks = checks if given["half_hour"] else []
        checks += one_gpu.checks(given["nccl"], quick=few, emulated=emulated)
    if given["half_hour"]:
        checks += capped.checks(quick=quick, emulated=emulated) + gains.checks(quick=quick, emulated=emulated)
        checks = half_hour.in_order(checks)
    words = given["only"]
    checks = [one for one in checks if not words or any(word in f"{one.kind}: {one.name}" for word in words)]
    results = half_hour.kept(file_of(given), found, {"emulated": emulated, "quick": quick}) if given["minutes"] else []
    checks = [one for one in checks if not half_hour.is_done(one, results)]
    clock = half_hour.Clock.of(given["minutes"], given["limit"])
    state = {"given": given, "environment": found, "checks": checks, "results": results, "clock": clock}
    config.stash[_STATE] = state
    return config.stash[_STATE]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "check" in metafunc.fixturenames:
        checks = state_of(metafunc.config)["checks"]
        metafunc.parametrize("check", checks, ids=[f"{one.kind}: {one.name}" for one in checks])


@pytest.fixture
def state(request: pytest.FixtureRequest) -> dict[str, Any]:
    return state_of(request.config)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _STATE not in session.config.stash or session.config.option.collectonly:
        return
    written = write(session.config.stash[_STATE])
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = int(not written["passed"])


def file_of(given: dict[str, Any]) -> Path:
    """The file of the results."""
    return Path(given["output"]) / "gpu_check.json"


def write(state: dict[str, Any]) -> dict[str, Any]:
    """Write the results so far, and return what was written."""
    from tests.gpu.checks import anonymous

    given, found, results = state["given"], state["environment"], state["results"]
    written = {
        **{"format": 1, "date": datetime.now(UTC).date().isoformat()},
        **{"emulated": given["emulated"], "quick": given["quick"]},
        "environment": {**found, "variables": {k: anonymous(v) for k, v in found["variables"].items()}},
        "checks": [asdict(one) for one in results],
        "passed": not any(one.result == "failed" and one.decides for one in results),
    }
    file_of(given).write_text(json.dumps(written, indent=1) + "\n")
    return written


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _STATE not in config.stash:
        return
    from bench.report import table

    from tests.gpu import environment
    from tests.gpu.half_hour import is_done

    state = config.stash[_STATE]
    results, emulated = state["results"], state["given"]["emulated"]
    rows = [
        [f"{one.kind}: {one.name}", one.result, ", ".join(f"{k} {_short(v)}" for k, v in one.figures.items())]
        for one in results
    ]
    failed = [f"{one.kind}: {one.name}: {one.message}" for one in results if one.result == "failed"]
    counts = {name: sum(one.result == name for one in results) for name in ("passed", "failed", "skipped")}
    lines = ["", *environment.lines(state["environment"]), *([EMULATED] if emulated else []), ""]
    lines += [table(["check", "result", "figures"], rows), "", *failed]
    counted = ", ".join(f"{count} {name}" for name, count in counts.items())
    if left := sum(not is_done(one, results) for one in state["checks"]):
        counted += f", {left} still to run by the same command"
    terminalreporter.write_line("\n".join([*lines, f"{counted}; written to gpu_check.json"]))


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
