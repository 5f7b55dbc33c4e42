"""How long `hf-gpipe plan` takes for models of 6 and 84 billion parameters, and how much memory.

    python scripts/bench_plan.py [--reps 3]

The first is GPipe's largest translation model, T(64, 16384, 32), as a T5 in 16 stages; the second its Table 1's deepest
Transformer, 1663 blocks, as a GPT-2 in 128 stages (arXiv 1811.06965). Each run is the whole command in a fresh process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.runner import parser

RECIPES = {
    "6B": """\
model:
  config:
    {model_type: t5, d_model: 1024, d_kv: 64, d_ff: 16384, num_layers: 64, num_decoder_layers: 64, num_heads: 32,
     vocab_size: 64000}
data: {kind: jsonl, path: pairs.jsonl, max_source_tokens: 128, max_target_tokens: 128}
pipeline: {num_stages: 16, num_micro_batches: 64, schedule: 1f1b, recompute: stage, partition: count}
training: {output_dir: out, batch_size: 1024, optim: adafactor}
""",
    "83.9B": """\
model:
  config:
    {model_type: gpt2, n_embd: 2048, n_inner: 8192, n_head: 32, n_layer: 1663, n_positions: 1024, vocab_size: 32000}
data: {kind: jsonl, path: pairs.jsonl, max_source_tokens: 512, max_target_tokens: 512}
pipeline: {num_stages: 128, num_micro_batches: 32, schedule: gpipe, recompute: stage, partition: count}
training: {output_dir: out, batch_size: 32, optim: rmsprop}
""",
}
LIMIT_SECONDS, LIMIT_GIB = 10.0, 2.0


def run(recipe: Path, name: str) -> tuple[float, float]:
    """Wall seconds and peak resident GiB of one command. Raises CalledProcessError where it neither fits nor not."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "hf_gpipe", "plan", str(recipe), "--device", "v100-16"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise subprocess.CalledProcessError(process.returncode, command, output)
    seconds, size = time.perf_counter() - start, usage.ru_maxrss / 2**20
    print(f"{name}: {output.splitlines()[0]}: {seconds:.1f} s, {size:.2f} GiB", flush=True)
    return seconds, size


def main() -> int:
    reps, is_within = parser(__doc__, reps=3).parse_args().reps, True
    with tempfile.TemporaryDirectory() as folder:
        for name, text in RECIPES.items():
            recipe = Path(folder) / "recipe.yaml"
            recipe.write_text(text)
            seconds, sizes = zip(*(run(recipe, name) for _ in range(reps)), strict=True)
            is_within &= median(seconds) <= LIMIT_SECONDS and max(sizes) <= LIMIT_GIB
            of_limits = f"{median(seconds):.1f} s of {LIMIT_SECONDS:g}, {max(sizes):.2f} GiB of {LIMIT_GIB:g}"
            print(f"{name}: median {of_limits}")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
