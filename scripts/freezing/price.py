"""Lets the planner of another checkout judge the plans of this one: none may be slower, or no longer fit.

Both checkouts make their own plans. The other one then prices those of this checkout, by its own account, so that
changes of the account itself count for nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
#: Runs in a checkout, with its package and its own module of plans: decides plans, or prices decided ones.
_PROGRAM = """
import json, sys
from pathlib import Path
from scripts.freezing import plans
into, only, given = sys.argv[1:]
if given:
    result = plans.account(json.loads(Path(given).read_text()))
else:
    result = {}
    for name in plans.names():
        if only in name:
            try:
                result[name] = plans.decided(name)
            except Exception as error:
                result[name] = {"error": str(error)}
Path(into).write_text(json.dumps(result))
"""


def compare(checkout: Path, only: str, slower: float) -> int:
    """Print the plans of this checkout that the other one's planner says are worse than its own; 1 if there is one."""
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-price-") as folder:
        own = _run(_ROOT, Path(folder), only)
        others = _run(checkout, Path(folder), only)
        path = Path(folder) / "given.json"
        path.write_text(json.dumps({name: plan for name, plan in own.items() if "keys" in plan}))
        priced = _run(checkout, Path(folder), only, str(path))
    num_worse = 0
    for name, plan in own.items():
        told = _worse(plan, others.get(name), priced.get(name, {}), slower)
        if told:
            num_worse += 1
            print(f"{name}: {told}")
    print(f"{len(own)} plans priced, {num_worse} are worse")
    return int(bool(num_worse))


def _worse(
    plan: Mapping[str, Any], other: Mapping[str, Any] | None, priced: Mapping[str, Any], slower: float
) -> str | None:
    """Why a plan is worse than that of the other checkout; None: it is not."""
    if other is None or "error" in other:
        return None
    if "error" in plan:
        return f"there was a plan, and now: {plan['error']}"
    if "error" in priced:
        return f"the other planner does not know it: {priced['error']}"
    if other["fits"] and not priced["fits"]:
        return f"it does not fit: {priced['peak_bytes']} bytes; before {other['peak_bytes']}"
    if other["fits"] and priced["step_seconds"] > (1 + slower) * other["step_seconds"]:
        return f"a step takes {priced['step_seconds']:.6g} s; before {other['step_seconds']:.6g}"
    return None


def _run(checkout: Path, folder: Path, only: str, given: str = "") -> dict[str, dict[str, Any]]:
    from scripts.freeze import environment

    into = folder / "result.json"
    command = [sys.executable, "-c", _PROGRAM, str(into), only, given]
    subprocess.run(command, check=True, cwd=checkout, env=environment(checkout), stdout=sys.stderr)
    result: dict[str, dict[str, Any]] = json.loads(into.read_text())
    return result
