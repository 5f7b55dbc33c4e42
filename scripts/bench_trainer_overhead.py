"""The overhead of `PipelineTrainer` over the step itself: host work outside of `train_step` and the optimizer.

    torchrun --nproc-per-node 2 scripts/bench_trainer_overhead.py              the bench model, two processes
    python scripts/bench_trainer_overhead.py --hidden 64 --steps 10            anything smaller, in one process

Every step of one run is taken apart: the pipeline's pass, the clipping, the optimizer, and what is left, which is the
trainer's own: data, callbacks, the log of every step, agreement between the processes. One JSON line, medians over the
steps; `overhead` is what is left over the whole step, `overhead_with_clipping` counts the clipping to it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.training.loop import TrainingLoop

VOCABULARY, LENGTH = 8192, 128


class Stopwatch:
    """Seconds spent in some functions since the last reading."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(name, time.perf_counter() - start)

        return timed

    def between(self, name: str, on_start: Callable[..., Any], on_end: Callable[..., Any]) -> None:
        """The same, of what two hooks stand around."""
        starts: list[float] = []
        on_start(lambda *_: starts.append(time.perf_counter()))
        on_end(lambda *_: self._add(name, time.perf_counter() - starts.pop()))

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds


class PerStep(TrainerCallback):
    """From the end of a step to the end of the next: its length, and what it was spent on."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._last = 0.0
        self.steps: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now, parts = time.perf_counter(), self._watch.read()
        if self._last:
            self.steps.append({"step": now - self._last, **parts})
        self._last = now


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Random tokens, all rows of one length."""

    def __init__(self, count: int) -> None:
        self._ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 384), ("layers", 8), ("rows", 16), ("micro", 8), ("stages", 2), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 4,
        num_hidden_layers=given.layers,
        num_attention_heads=6 if given.hidden % 6 == 0 else 4,
        max_position_embeddings=LENGTH,
    )
    with tempfile.TemporaryDirectory() as folder:
        args = PipelineTrainingArguments(
            output_dir=folder,
            num_stages=given.stages,
            num_micro_batches=given.micro,
            per_device_train_batch_size=given.rows,
            max_steps=given.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=False,
        )
        watch = Stopwatch()
        per_step = PerStep(watch)
        trainer = PipelineTrainer(config, args, train_dataset=Rows(8 * given.rows), callbacks=[per_step])
        pipe = trainer.pipe
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, fused=True)
        trainer.optimizer = optimizer
        TrainingLoop._update = watch.around("update", TrainingLoop._update)  # type: ignore[method-assign]
        pipe.train_on = watch.around("train_on", pipe.train_on)  # type: ignore[method-assign]
        pipe.clip_grad_norm_ = watch.around("clipping", pipe.clip_grad_norm_)  # type: ignore[method-assign]
        watch.between("optimizer", optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
        trainer.train()
    # The first steps warm up caches, allocators and connections.
    steps = per_step.steps[len(per_step.steps) // 4 :]
    for one in steps:
        one["train_step"] = one["train_on"] - one["update"]  # which the pipeline's pass ends with
    parts = {name: median(step[name] for step in steps) for name in ("step", "train_step", "clipping", "optimizer")}
    rest = median(s["step"] - s["train_step"] - s["clipping"] - s["optimizer"] for s in steps)
    clipping = median(s["step"] - s["train_step"] - s["optimizer"] for s in steps)
    shares = {"overhead": rest / parts["step"], "overhead_with_clipping": clipping / parts["step"]}
    figures: dict[str, float] = {f"{name}_seconds": round(value, 5) for name, value in parts.items()}
    figures |= {name: round(value, 4) for name, value in shares.items()}
    if trainer.is_world_process_zero():
        print(
            json.dumps(
                {**vars(given), "processes": trainer.topology.num_processes, "measured_steps": len(steps), **figures}
            )
        )


if __name__ == "__main__":
    main()
