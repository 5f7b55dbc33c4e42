"""What GPipe's translation models take on machines of today: the fastest plan of each recipe, from the planner alone.

    python scripts/paper_plans.py [--output FILE.json] [RECIPE ...]        about 15 minutes

For every recipe of the paper's sizes and every group of devices it runs `python -m hf_gpipe.plan --search`, which
chooses stages, replicas, M, schedule, recomputation and split. Nothing is trained. "tokens a day" are target tokens, if
every row is as long as the recipe allows. Plans that FILE.json has are not made again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import table
from translation_scaling.plans import predict

from hf_gpipe.command import Parser, run_command
from hf_gpipe.errors import UserError
from hf_gpipe.planner.report import runs_text
from hf_gpipe.planner.traffic import bytes_text

RECIPES = Path(__file__).parents[1] / "recipes" / "translation"
MODELS = ("paper-400m", "paper-1.3b-deep", "paper-1.3b-wide", "paper-3b", "paper-6b")
SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True)
class Machines:
    """A group of devices: its name in the table, and the words that name it to the planner."""

    name: str
    words: tuple[str, ...]


MACHINES = (
    Machines("8 x RTX 4090 (24 GB, PCIe)", ("--device", "rtx4090", "--devices", "8")),
    Machines("8 x A100 (80 GB, NVLink)", ("--device", "a100-80", "--devices", "8")),
    Machines("4 machines of 8 x A100 (100 Gbit/s)", ("--device", "a100-80", "--devices", "4x8")),
)


def mesh(found: dict[str, Any]) -> str:
    """Stages and devices of a pipeline, and how many pipelines there are."""
    replicas = found["replicas"]
    if not isinstance(replicas, int):
        return f"{found['num_stages']} stages, {replicas}"
    return f"{found['num_stages']} on {found['num_processes'] // replicas}, x {replicas}"


def row(machines: Machines, recipe: str, found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    if "error" in found:
        return [machines.name, recipe, found["error"], *[""] * 6]
    recompute = found["recompute"]
    return [
        machines.name,
        recipe,
        mesh(found),
        f"{found['num_micro_batches']}",
        f"{found['schedule']}, {recompute if isinstance(recompute, str) else runs_text(recompute)}",
        f"{found['step_seconds']:.2f}",
        f"{found['tokens_per_step'] / found['step_seconds'] * SECONDS_OF_A_DAY / 1e9:.2f}",
        f"{found['bubble']:.1%}",
        bytes_text(found["bytes"]),
    ]


def planned(machines: Machines, recipe: str) -> dict[str, Any]:
    """What the table has of a plan."""
    found = predict(RECIPES / f"{recipe}.yaml", [*machines.words, "--search"])
    if found.plan is None:
        return {"error": found.error}
    settings, shape = found.plan["settings"], found.plan["micro_batch"]
    replicas = settings["replicas"]
    return {
        "num_stages": settings["num_stages"],
        "num_processes": settings["num_processes"],
        "replicas": replicas if isinstance(replicas, int) else "-".join(map(str, replicas)),
        "num_micro_batches": settings["num_micro_batches"],
        "schedule": settings["schedule"],
        "recompute": settings["recompute"],
        "step_seconds": found.plan["step_seconds"],
        "tokens_per_step": found.plan["rows"] * shape["target_tokens"] * found.accumulation,
        "bubble": found.plan["bubble"],
        "bytes": found.heaviest["memory_bytes"]["total"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""

    def work() -> int:
        parser = Parser(prog="python scripts/paper_plans.py", description=__doc__)
        parser.add_argument("recipes", nargs="*", help=f"of {', '.join(MODELS)}; none: all")
        parser.add_argument("--output", type=Path, help="the plans, as JSON")
        options = parser.parse_args(argv)
        if unknown := sorted(set(options.recipes) - set(MODELS)):
            raise UserError(f"{unknown[0]!r} is no recipe of the paper's sizes; there are {', '.join(MODELS)}")
        plans: dict[str, Any] = {}
        if options.output is not None and options.output.exists():
            plans = json.loads(options.output.read_text(encoding="utf-8"))
        rows = []
        for machines in MACHINES:
            for recipe in options.recipes or MODELS:
                name = f"{recipe} on {machines.name}"
                if name not in plans:
                    plans[name] = planned(machines, recipe)
                    if options.output is not None:
                        options.output.write_text(json.dumps(plans, indent=2), encoding="utf-8")
                rows.append(row(machines, recipe, plans[name]))
                print(" | ".join(rows[-1]), file=sys.stderr)
        head = ["devices", "recipe", "stages on devices, x D", "M", "schedule, recomputation", "seconds a step"]
        print(table([*head, "10^9 tokens a day", "bubble", "fullest process"], rows))
        return 0

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
