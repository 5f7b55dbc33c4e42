"""Time of a step of a llama in two processes on this CPU: divided layers, stages, and transformers' divided layers.

The same model, rows and micro-batches; float32, without dropout, eager attention, gloo, one thread a process. All runs
take turns, and the table has the median of the steps. transformers runs a loop over the micro-batches with its own
loss.

    python scripts/bench_tensor_parallel.py
    python scripts/bench_tensor_parallel.py --width 1024 --layers 4
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from bench.models import llama, random_batch
from bench.processes import in_turns, run_job
from bench.report import Spread, table
from bench.runner import parser
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_gpipe import Pipeline
from hf_gpipe.runtime.cutting import split_rows

ROWS, TOKENS, MICRO_BATCHES, VOCABULARY, WARM_UP = 8, 128, 4, 8000, 2


def of_pipeline(directory: str, **options: Any) -> Callable[[], None]:
    """A step of ours, with the gradients in `.grad`."""
    pipe = Pipeline(
        directory, num_micro_batches=MICRO_BATCHES, recompute="none", attn_implementation="eager", **options
    )
    rows = random_batch(ROWS, TOKENS, VOCABULARY)

    def step() -> None:
        pipe.zero_grad()
        pipe.train_step(rows)

    return step


def of_transformers(directory: str, **options: Any) -> Callable[[], None]:
    """A step of transformers' model, in a loop over the micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **options).train()
    rows = split_rows(random_batch(ROWS, TOKENS, VOCABULARY), MICRO_BATCHES)

    def step() -> None:
        model.zero_grad()
        for row in rows:
            (model(**row, use_cache=False).loss / MICRO_BATCHES).backward()

    return step


def measure(directory: str, num_steps: int) -> dict[str, list[float]]:
    """One process's part: the seconds of each step, each way in turn."""
    torch.manual_seed(0)
    steps = {
        "ours, T=2": of_pipeline(directory, num_stages=1, tensor_parallel=2, schedule="gpipe"),
        "ours, K=2, 1f1b": of_pipeline(directory, num_stages=2, schedule="1f1b"),
        "transformers, tp_size=2": of_transformers(directory, distributed_config=DistributedConfig(tp_size=2)),
    }
    return in_turns(steps, num_steps, WARM_UP)


def main() -> int:
    options = parser(__doc__, steps=7, width=512, layers=6).parse_args()
    heads = {"heads": 8, "num_key_value_heads": 4}
    config = llama(options.width, options.layers, VOCABULARY, 3 * options.width, **heads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        seconds, _ = run_job(measure, (directory, options.steps), 2, timeout_seconds=3600)
    rows = [[name, *(f"{value:.3f}" for value in Spread.of(own))] for name, own in seconds.items()]
    print(table(["two processes", "median s", "min", "max"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
