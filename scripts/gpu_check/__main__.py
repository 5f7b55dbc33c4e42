"""Checks hf_gpipe on the GPUs of this machine. Prints one table, and writes gpu_check.json to attach to an issue.

Nothing can hang it: every check runs in processes of its own with a time limit. Exit codes: 0; 1 where a check of
exactness, of faults and hangs, or of the order of accesses failed, or any check ran into its limit; 2 where there is no
GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NO_GPU = (
    "error: torch finds no CUDA device here. Install a CUDA build of torch (docs/gpu.md), or run the checks on "
    "emulated devices: bash scripts/gpu_check.sh --emulated"
)
EMULATED = """\
EMULATED: CUDA devices on the CPU's memory, and a stand-in for NCCL (tests/emulated_cuda/README.md).
Real here: values, hf_gpipe's code for CUDA, the order of its messages, its faults.
Not shown: asynchrony, CUDA's rounding and kernels, NCCL, the allocator, speed."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer combinations, and speed with one repetition")
    parser.add_argument("--emulated", action="store_true", help="on emulated devices: no GPU, no figures of speed")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="checks whose kind or name has one of these words")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--gpus", type=int, help="use at most this many")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a check has failed")
    parser.add_argument("--reps", type=int, default=5, help="repetitions of each figure of speed")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also write memory snapshots and a trace there")
    parser.add_argument("--output", type=Path, default=Path("."), help="the folder of gpu_check.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    # Where Python was started with the devices, it has imported this module. They are loaded with torch.
    if arguments.emulated and "tests.emulated_cuda.device" not in sys.modules:
        return _again_with_the_devices()
    from gpu_check import environment, running, speed
    from gpu_check.checks import Check, checks_for, profile_checks, selected

    emulated, common = arguments.emulated, {"emulated": arguments.emulated}
    (found,) = running.call(Check("", "", "environment:describe", common, limit_seconds=120), emulated=emulated)
    num_gpus = min(len(found["gpus"]), arguments.gpus or (2 if emulated else 4))
    if not num_gpus:
        print(NO_GPU, file=sys.stderr)
        return 2
    print(*environment.lines(found), *([EMULATED] if emulated else []), "", sep="\n", flush=True)
    checks = checks_for(num_gpus, quick=arguments.quick, emulated=emulated, limit_seconds=arguments.limit)
    if arguments.profile:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        checks += profile_checks(num_gpus, str(arguments.profile.resolve()), emulated=emulated)
    comparisons = speed.comparisons(found, num_gpus, quick=arguments.quick, emulated=emulated)
    words = arguments.only
    comparisons = [one for one in comparisons if not words or any(word in f"speed: {one.name}" for word in words)]
    checks = selected(checks, words)
    if arguments.list:
        print(*(f"{one.kind}: {one.name}" for one in checks), *(f"speed: {one.name}" for one in comparisons), sep="\n")
        return 0
    results = []
    for check in checks:
        results.append(running.run(check, emulated=emulated))
        _say(results[-1])
    for comparison in comparisons:
        reps = 1 if arguments.quick or emulated else arguments.reps
        for result in speed.measure(comparison, reps, arguments.limit, emulated=emulated):
            results.append(result)
            _say(result)
    failed = [one for one in results if one.result == "failed"]
    decisive = [one for one in failed if one.decides]
    written = {
        "format": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "emulated": emulated,
        "quick": arguments.quick,
        "environment": {**found, "variables": {k: running.anonymous(v) for k, v in found["variables"].items()}},
        "checks": [one.as_json() for one in results],
        "passed": not decisive,
    }
    path = arguments.output / "gpu_check.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(f"\n{_table(results)}\n")
    if emulated:
        print(EMULATED)
    counts = {name: sum(one.result == name for one in results) for name in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + f"; written to {path.name}")
    return 1 if decisive else 0


def _again_with_the_devices() -> int:
    """Replace this process with one that has the emulated devices, which are loaded before torch."""
    from tests.emulated_cuda.__main__ import environment
    from tests.emulated_cuda.build import NoCompilerError, library

    try:
        library("device")
    except NoCompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.execve(sys.executable, [sys.executable, "-m", "gpu_check", *sys.argv[1:]], environment(os.environ))


def _say(result: Any) -> None:
    """A line while the checks run."""
    print(f"{result.result:8}{result.seconds:6.1f} s  {result.kind}: {result.name}  {result.message}", flush=True)


def _table(results: Sequence[Any]) -> str:
    from bench.report import table

    rows = [
        [f"{one.kind}: {one.name}", one.result, ", ".join(f"{k} {_short(v)}" for k, v in one.figures.items())]
        for one in results
    ]
    return table(["check", "result", "figures"], rows)


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
