"""The cost of GPipe's translation models on machines of today: the fastest plan of each recipe, from the planner alone.

    python scripts/paper_plans.py [RECIPE ...]        about 15 minutes

For every recipe of the paper's sizes and every group of devices it runs `hf-gpipe plan --search`, which
chooses stages, replicas, M, schedule, recomputation and split. Nothing is trained. "tokens a day" are target tokens, if
every row is as long as the recipe allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import table

from hf_gpipe.commands.base import Parser, run_command
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import load_recipe
from hf_gpipe.text import bytes_text, runs_text

RECIPES = Path(__file__).parents[1] / "recipes" / "translation"
MODELS = ("paper-400m", "paper-1.3b-deep", "paper-1.3b-wide", "paper-3b", "paper-6b")
#: The name of a group of devices in the table, and its name and number to the planner.
MACHINES = {
    "8 x RTX 4090 (24 GB, PCIe)": ("rtx4090", "8"),
    "8 x A100 (80 GB, NVLink)": ("a100-80", "8"),
    "4 machines of 8 x A100 (100 Gbit/s)": ("a100-80", "4x8"),
}


def planned(machines: str, recipe: Path) -> dict[str, Any]:
    """The fastest plan of the planner's command, or the leanest where nothing fits; or its error."""
    device, count = MACHINES[machines]
    command = [sys.executable, "-m", "hf_gpipe", "plan", str(recipe), "--device", device, "--devices", count]
    result = subprocess.run([*command, "--search", "--json"], capture_output=True, text=True)
    # 1: it does not fit, which the plan says too.
    if result.returncode not in (0, 1) or not result.stdout.strip():
        return {"error": (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]}
    plans = json.loads(result.stdout)
    plan: dict[str, Any] = plans["fastest"][0] if plans["fastest"] else plans["leanest"]
    return plan | {"accumulation": load_recipe(recipe).training.gradient_accumulation_steps}


def row(machines: str, recipe: str, plan: dict[str, Any]) -> list[str]:
    """A line of the table."""
    if "error" in plan:
        return [machines, recipe, plan["error"], *[""] * 6]
    settings = plan["settings"]
    replicas, recompute, stages = settings["replicas"], settings["recompute"], settings["num_stages"]
    mesh = f"{stages} stages, {'-'.join(map(str, replicas))}" if isinstance(replicas, list) else ""
    tokens = plan["rows"] * plan["micro_batch"]["target_tokens"] * plan["accumulation"]
    return [
        *(machines, recipe, mesh or f"{stages} on {settings['num_processes'] // replicas}, x {replicas}"),
        f"{settings['num_micro_batches']}",
        f"{settings['schedule']}, {recompute if isinstance(recompute, str) else runs_text(recompute)}",
        *(f"{plan['step_seconds']:.2f}", f"{tokens / plan['step_seconds'] * 86_400 / 1e9:.2f}"),
        *(f"{plan['bubble']:.1%}", bytes_text(max(process["memory_bytes"]["total"] for process in plan["processes"]))),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""

    def work() -> int:
        parser = Parser(__doc__)
        parser.add_argument("recipes", nargs="*", help=f"of {', '.join(MODELS)}; none: all")
        options = parser.parse_args(argv)
        if unknown := sorted(set(options.recipes) - set(MODELS)):
            raise UserError(f"{unknown[0]!r} is no recipe of the paper's sizes; there are {', '.join(MODELS)}")
        rows = []
        for machines in MACHINES:
            for recipe in options.recipes or MODELS:
                rows.append(row(machines, recipe, planned(machines, RECIPES / f"{recipe}.yaml")))
                print(" | ".join(rows[-1]), file=sys.stderr)
        head = ["devices", "recipe", "stages on devices, x D", "M", "schedule, recomputation", "seconds a step"]
        print(table([*head, "10^9 tokens a day", "bubble", "highest peak memory"], rows))
        return 0

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
