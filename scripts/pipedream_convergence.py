"""The cost of late gradients: loss over updates and over time of PipeDream's schedules beside 1f1b.

    python scripts/pipedream_convergence.py recipes/quickstart.yaml --json convergence.json \\
        model.config.tie_word_embeddings=false model.config.share_encoder_decoder_embeddings=false

Each schedule trains the same recipe with every learning rate and seed, one run after another. A run that has ended is
not repeated, so the script may be stopped and started again. Needs a model whose weights are not tied across stages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.report import table, write_json

#: The synchronous schedule first; those that follow cut a mini-batch as it does.
SCHEDULES = ("1f1b", "pipedream", "pipedream_vertical", "pipedream_2bw")


@dataclass(frozen=True)
class Run:
    """One training."""

    schedule: str
    learning_rate: float
    seed: int

    def overrides(self, folder: Path) -> list[str]:
        return [
            f"pipeline.schedule={self.schedule}",
            f"training.learning_rate={self.learning_rate}",
            f"training.seed={self.seed}",
            f"training.output_dir={self.folder(folder)}",
        ]

    def folder(self, parent: Path) -> Path:
        return parent / f"{self.schedule}-{self.learning_rate:g}-{self.seed}"


def train(run: Run, recipe: str, folder: Path, overrides: Sequence[str]) -> None:
    """Train, unless it is done. A run that fails, because it diverges for example, is a line without an end."""
    if not (run.folder(folder) / "metrics.json").exists():
        words = [sys.executable, "-m", "hf_gpipe.train", recipe, *overrides, *run.overrides(folder)]
        code = subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode
        print(f"{run.folder(folder).name}: exit code {code}", file=sys.stderr, flush=True)


def curve(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The losses at each log and evaluation, with the seconds of training so far."""
    path = run.folder(folder) / "metrics.jsonl"
    seconds, found = 0.0, []
    for line in path.read_text().splitlines() if path.exists() else ():
        logs = json.loads(line)
        seconds += logs.get("training_seconds", 0.0)
        found += [
            {"step": logs["step"], "seconds": seconds, "name": name, "loss": logs[name]}
            for name in ("loss", "eval_loss")
            if name in logs
        ]
    return found


def last(points: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    return next((one for one in reversed(points) if one["name"] == name), {"loss": float("nan"), "seconds": 0.0})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe, for all runs")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--folder", type=Path, default=Path("outputs/convergence"))
    parser.add_argument("--json", type=Path, help="where to write the curves")
    arguments = parser.parse_intermixed_args(argv)
    rows, results = [], []
    for schedule in arguments.schedules:
        for rate in arguments.rates:
            runs = [Run(schedule, rate, seed) for seed in arguments.seeds]
            for run in runs:
                train(run, arguments.recipe, arguments.folder, arguments.overrides)
            curves = [curve(run, arguments.folder) for run in runs]
            results += [{**asdict(run), "points": points} for run, points in zip(runs, curves, strict=True)]
            losses = [[last(points, name)["loss"] for points in curves] for name in ("loss", "eval_loss")]
            seconds = mean(last(points, "loss")["seconds"] for points in curves)
            shown = [f"{mean(of_seeds):.4f} ({min(of_seeds):.4f} to {max(of_seeds):.4f})" for of_seeds in losses]
            rows.append([schedule, f"{rate:g}", *shown, f"{seconds:.0f}"])
            write_json(arguments.json, {"recipe": arguments.recipe, "results": results})
    print(table(["schedule", "learning rate", "last training loss", "evaluation loss", "seconds"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
