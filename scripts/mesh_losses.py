"""The first losses of the quickstart, with dropout, for several meshes of processes.

Each run is `hf-gpipe train recipes/quickstart.yaml` with the overrides below: dropout, less data, a loss
logged after every step. The table has each run's losses, and the largest difference from one process alone. Exit code:
0 where none is larger than --within, 1 otherwise.

    python scripts/mesh_losses.py                                        about five minutes
    python scripts/mesh_losses.py --steps 20 pipeline.boundary_dtype=bfloat16 --within 1
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import table
from bench.runner import parser

ROOT = Path(__file__).parents[1]
#: Number of stages, replicas and tensor_parallel, by the name of the run; the others are compared with the first.
RUNS = {
    "D=1 K=1": ("1", "1", "1"),
    "D=2 K=1": ("1", "2", "1"),
    "D=1 K=2": ("2", "1", "1"),
    "D=2 K=2": ("2", "2", "1"),
    "2-1": ("2", "[2,1]", "1"),
    "T=2": ("1", "1", "2"),
    "K=2 T=2": ("2", "1", "2"),
}
OVERRIDES = (
    *("model.config.dropout=0.1", "model.config.attention_dropout=0.1", "model.config.activation_dropout=0.1"),
    *("data.examples_per_language=600", "data.max_number=99", "training.logging_steps=1"),
    *("training.eval_steps=null", "training.save_steps=null", "evaluation.max_examples=1"),
    "model.attn_implementation=eager",  # the mask of sdpa's own dropout cannot be divided
)


def logged(name: str, num_steps: int, overrides: Sequence[str], folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps of one run. Raises RuntimeError if it fails."""
    num_stages, replicas, size = RUNS[name]
    output = folder / name.replace(" ", "-")
    if name == "D=1 K=1":
        overrides = [word for word in overrides if not word.startswith(("pipeline.boundary", "pipeline.zero"))]
    settings = (*OVERRIDES, f"training.max_steps={num_steps}", f"training.output_dir={output}")
    mesh = (f"pipeline.num_stages={num_stages}", f"pipeline.replicas={replicas}", f"pipeline.tensor_parallel={size}")
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    command = [sys.executable, "-m", "hf_gpipe.train", recipe, *settings, *mesh, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line][:num_steps]


def main() -> int:
    made = parser(__doc__, steps=20)
    made.add_argument("--within", type=float, default=1e-6, help="the largest difference of two losses")
    made.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="those to compare with one process")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="more overrides, for all runs but the first")
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-mesh-") as folder:
        names = dict.fromkeys((next(iter(RUNS)), *options.runs))
        losses = {
            name: [loss for loss, _ in logged(name, options.steps, options.overrides, Path(folder))] for name in names
        }
    steps = zip(*losses.values(), strict=True)
    print(table(["step", *losses], [[step, *(f"{loss:.8f}" for loss in row)] for step, row in enumerate(steps, 1)]))
    first, *others = losses.values()
    largest = [max(abs(a - b) for a, b in zip(first, other, strict=True)) for other in others]
    print("largest difference from the first:", ", ".join(f"{difference:.1e}" for difference in largest))
    return 0 if max(largest) <= options.within else 1


if __name__ == "__main__":
    sys.exit(main())
