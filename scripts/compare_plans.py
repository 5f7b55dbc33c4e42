"""Compares the plans of this checkout with those of another: python scripts/compare_plans.py OTHER_CHECKOUT

For every recipe, for 1, 2 and 8 devices and for two limits of memory, as written and with everything left to the
planner, it runs `python -m hf_gpipe plan ... --json` in both and prints how their outputs differ, errors included. A
change of the planner's code that is not meant to change plans prints "0 differ". Exit code: 0 none differs, 1 some do.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent.parent
_OVERRIDES: dict[str, list[str]] = {
    "as written": [],
    "auto": ["pipeline.partition=auto", "pipeline.recompute=auto"],
    "block": ["pipeline.partition=auto", "pipeline.recompute=block", "pipeline.schedule=1f1b"],
}
_CASES = list(itertools.product(_OVERRIDES, ("1", "2", "8"), ("16GiB", "80GiB")))


def main() -> int:
    """Compare, or with --write only write the plans of the code that is imported to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", help="folder of the other checkout")
    parser.add_argument("--recipes", default="", help="only recipes whose path contains this")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        print(json.dumps(plans(options.recipes)))
        return 0
    if options.other is None:
        parser.error("name the folder of the other checkout")
    own, others = (plans_of(Path(checkout), options.recipes) for checkout in (_HERE, options.other))
    differing = [name for name in own if own[name] != others.get(name)]
    for name in differing:
        here, there = (json.dumps(plans.get(name), indent=1).splitlines() for plans in (own, others))
        print(name, *difflib.unified_diff(there, here, "there", "here", lineterm=""), sep="\n")
    print(f"{len(own)} plans compared, {len(differing)} differ")
    return 1 if differing else 0


def plans_of(checkout: Path, recipes: str) -> dict[str, Any]:
    """The plans of a checkout's code for this checkout's recipes, made in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--recipes", recipes, "--write"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, check=True, env=environment, cwd=checkout, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def plans(recipes: str) -> dict[str, Any]:
    """The output of the command for its arguments."""
    from hf_gpipe.commands.plan import main as plan

    outcomes = {}
    for path in sorted((_HERE / "recipes").rglob("*.yaml")):
        name = str(path.relative_to(_HERE))
        for what, devices, memory in _CASES if recipes in name else ():
            command = [str(path), *_OVERRIDES[what], "--devices", devices, "--memory", memory, "--json"]
            output, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                code = plan(command)
            plan_or_error = json.loads(output.getvalue()) if code < 2 else errors.getvalue()
            outcomes[f"{name}, {what}, {devices} x {memory}"] = {"code": code, "plan": plan_or_error}
        print(name, file=sys.stderr, flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
