"""The first losses of the quickstart, with dropout, for several numbers of replicas and stages, in processes.

Each run is `python -m hf_gpipe.train recipes/quickstart.yaml` with the overrides below: dropout, less data, a loss
logged after every step. The table has each run's losses, and the largest difference from one process alone. Exit code:
0 where none is larger than --within, 1 otherwise.

    python scripts/mesh_losses.py                                        about five minutes
    python scripts/mesh_losses.py --steps 20 pipeline.boundary_dtype=bfloat16 --within 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
#: Number of stages and replicas, by the name of the run; the first is what the others are compared with.
RUNS = {
    "D=1 K=1": ["1", "1"],
    "D=2 K=1": ["1", "2"],
    "D=1 K=2": ["2", "1"],
    "D=2 K=2": ["2", "2"],
    "2-1": ["2", "[2,1]"],
}
OVERRIDES = (
    *("model.config.dropout=0.1", "model.config.attention_dropout=0.1", "model.config.activation_dropout=0.1"),
    *("data.examples_per_language=600", "data.max_number=99", "training.logging_steps=1"),
    *("training.eval_steps=null", "training.save_steps=null", "evaluation.max_examples=1"),
)


def logged(name: str, num_steps: int, overrides: Sequence[str], folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps of one run. Raises RuntimeError if it fails."""
    num_stages, replicas = RUNS[name]
    output = folder / name.replace(" ", "-")
    settings = (
        *(*OVERRIDES, f"training.max_steps={num_steps}", f"training.output_dir={output}"),
        *(f"pipeline.num_stages={num_stages}", f"pipeline.replicas={replicas}", *overrides),
    )
    if name == "D=1 K=1":
        settings = tuple(one for one in settings if not one.startswith(("pipeline.boundary", "pipeline.zero")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hf_gpipe.train", str(RECIPE), *settings]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line][:num_steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, default=1e-6, help="the largest difference of two losses")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="those to compare with one process")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more overrides, for all runs but the first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-mesh-") as folder:
        names = dict.fromkeys((next(iter(RUNS)), *arguments.runs))
        found = {
            name: [loss for loss, _ in logged(name, arguments.steps, arguments.overrides, Path(folder))]
            for name in names
        }
    first, *others = found.values()
    print("step  " + "  ".join(f"{name:>11}" for name in found))
    for step, row in enumerate(zip(*found.values(), strict=True), 1):
        print(f"{step:4}  " + "  ".join(f"{loss:11.8f}" for loss in row))
    largest = [max(abs(a - b) for a, b in zip(first, other, strict=True)) for other in others]
    print("largest difference from the first:", ", ".join(f"{one:.1e}" for one in largest))
    return 0 if max(largest) <= arguments.within else 1


if __name__ == "__main__":
    sys.exit(main())
