"""Two heterogeneous devices: python scripts/heterogeneous.py [--factor 2]

A llama of equal blocks trains in two processes, of which the second sleeps after each computation, so that it is so
many times as slow. Steps with the split that takes both for equal, and with measured speeds (`speeds: profile`), are
measured in turn. The bound is the time of all the work on the first device, shared out without a rest, and with GPipe's
bubble for M micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist
from bench.models import llama, random_batch
from bench.processes import in_turns, run_job
from bench.runner import parser

from hf_gpipe import Pipeline
from hf_gpipe.runtime.stage import Stage

LENGTH, MICRO_BATCHES = 128, 16


def main() -> None:
    made = parser(__doc__, blocks=17, steps=5)
    made.add_argument("--factor", type=float, default=2.0, help="how many times as slow the second process is")
    options = made.parse_args()
    ((alone, _, _),) = run_job(_train, (1.0, options.blocks, options.steps), 1)
    (seconds, partition, speeds), _ = run_job(_train, (options.factor, options.blocks, options.steps), 2)
    bound = alone["equal"] / (1 + 1 / options.factor) * (MICRO_BATCHES + 1) / MICRO_BATCHES
    print(f"one process {alone['equal']:.3f} s, bound of the two {bound:.3f} s, measured speeds {list(speeds)}")
    for kind, of_step in seconds.items():
        print(f"{kind}: layers {list(partition[kind])}, a step {of_step:.3f} s, {bound / of_step:.2f} of the bound")


def _train(factor: float, blocks: int, steps: int) -> tuple[dict[str, float], dict[str, Any], Any]:
    """In each process the median seconds of a step, and the layers of each stage, by how the model was split."""
    if dist.is_initialized() and dist.get_rank() == 1:
        for name in ("forward", "recompute", "backward"):
            setattr(Stage, name, _slowed(getattr(Stage, name), factor))
    config, batch = llama(256, blocks, 256), random_batch(2 * MICRO_BATCHES, LENGTH, 256)
    num_processes = dist.get_world_size() if dist.is_initialized() else 1
    given: dict[str, Any] = {"schedule": "1f1b", "recompute": "none", "partition": "auto", "example": batch}
    kinds = {"equal": None, "profile": "profile"} if num_processes > 1 else {"equal": None}
    pipes = {
        kind: Pipeline(config, num_processes, MICRO_BATCHES, speeds=speeds, **given) for kind, speeds in kinds.items()
    }
    seconds = in_turns({kind: partial(pipe.train_step, batch) for kind, pipe in pipes.items()}, steps)
    medians = {kind: median(each) for kind, each in seconds.items()}
    partition = {kind: pipe.config.partition for kind, pipe in pipes.items()}
    return medians, partition, pipes[list(kinds)[-1]].config.speeds or [1.0]


def _slowed(method: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """A method that takes so many times its time on a core."""

    def run(*arguments: Any, **named: Any) -> Any:
        start = time.thread_time()
        result = method(*arguments, **named)
        time.sleep((factor - 1) * (time.thread_time() - start))
        return result

    return run


if __name__ == "__main__":
    main()
