"""The overhead of `PipelineTrainer` over the step itself: host work outside of `train_step` and the optimizer.

    torchrun --nproc-per-node 2 scripts/bench_trainer_overhead.py              the bench model, two processes
    python scripts/bench_trainer_overhead.py --hidden 64 --steps 10            anything smaller, in one process

Every step of one run is taken apart: the pipeline's pass, the clipping, the optimizer, and what is left, which is the
trainer's own: data, callbacks, the log of every step, agreement between the processes. One JSON line, medians over the
steps; `overhead` is what is left over the whole step, `overhead_with_clipping` counts the clipping to it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench.models import llama, random_rows
from bench.runner import parser
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.training.updates import Updates

VOCABULARY, LENGTH = 8192, 128


class Stopwatch(TrainerCallback):
    """Of each step, from the end of the one before, its seconds and those spent in some functions."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._last = 0.0
        self.steps: list[dict[str, float]] = []

    def around(self, owner: Any, name: str, part: str) -> None:
        """Count the seconds in a function of `owner` as a part of the step."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    def between(self, part: str, on_start: Callable[..., Any], on_end: Callable[..., Any]) -> None:
        """The same, of what two hooks stand around."""

        def add(seconds: float) -> None:
            self._seconds[part] += seconds

        on_start(lambda *_: add(-time.perf_counter()))
        on_end(lambda *_: add(time.perf_counter()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, parts, self._seconds = time.perf_counter(), self._seconds, Counter()
        if self._last:
            self.steps.append({"step": now - self._last, **parts})
        self._last = now


def main() -> None:
    given = parser(__doc__, hidden=384, layers=8, rows=16, micro=8, stages=2, steps=30).parse_args()
    torch.set_num_threads(1)
    heads = 6 if given.hidden % 6 == 0 else 4
    config = llama(given.hidden, given.layers, VOCABULARY, heads=heads, max_position_embeddings=LENGTH)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        args = PipelineTrainingArguments(
            output_dir=folder,
            num_stages=given.stages,
            num_micro_batches=given.micro,
            per_device_train_batch_size=given.rows,
            max_steps=given.steps,
            **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": False},
        )
        rows = random_rows(8 * given.rows, LENGTH, VOCABULARY)
        trainer = PipelineTrainer(config, args, train_dataset=rows, callbacks=[watch])
        trainer.optimizer = optimizer = torch.optim.AdamW(trainer.pipe.parameters(), lr=1e-4, fused=True)
        watch.around(Updates, "_update", "update")
        watch.around(trainer.pipe, "train_on", "train_on")
        watch.around(trainer.pipe, "clip_grad_norm_", "clipping")
        watch.between("optimizer", optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
        trainer.train()
    # The first steps warm up caches, allocators and connections.
    steps = watch.steps[len(watch.steps) // 4 :]
    for step in steps:
        step["train_step"] = step["train_on"] - step["update"]  # which the pipeline's pass ends with
        step["with_clipping"] = step["step"] - step["train_step"] - step["optimizer"]
        step["rest"] = step["with_clipping"] - step["clipping"]
    parts = {name: median(step[name] for step in steps) for name in steps[0]}
    figures = {f"{name}_seconds": round(parts[name], 5) for name in ("step", "train_step", "clipping", "optimizer")}
    for name, part in (("overhead", "rest"), ("overhead_with_clipping", "with_clipping")):
        figures[name] = round(parts[part] / parts["step"], 4)
    if trainer.is_world_process_zero():
        counts = {"processes": trainer.world.num_processes, "measured_steps": len(steps)}
        print(json.dumps({**vars(given), **counts, **figures}))


if __name__ == "__main__":
    main()
