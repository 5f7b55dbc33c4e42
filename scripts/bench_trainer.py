"""Time of `PipelineTrainer` beside the step itself: its own host work, or the saving of checkpoints.

    torchrun --nproc-per-node 2 scripts/bench_trainer.py overhead              a llama of 8 layers, two processes
    python scripts/bench_trainer.py saving                                     300 million parameters with AdamW
    python scripts/bench_trainer.py saving --hidden 64 --layers 4 --steps 6    anything smaller

overhead: every step of one run is taken apart: the pipeline's pass, the clipping, the optimizer, and what is left,
which is the trainer's own: data, callbacks, the log of every step, agreement between the processes. One JSON line,
medians over the steps; `overhead` is what is left over the whole step, `overhead_with_clipping` with the clipping.

saving: windows of as many steps follow each other in one training; every second one begins with a save, which deletes
the checkpoint before. One JSON line for each way to save: medians over the windows, and their ratio. `written_after` is
the number of steps after which the checkpoint had its name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.models import llama, random_rows
from bench.runner import parser
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.pipeline.steps import Steps
from hf_gpipe.training.updates import Updates

VOCABULARY, WARM_UP = 8192, 3
#: What is measured, and the sizes that it is measured with.
SIZES = {
    "overhead": {"hidden": 384, "layers": 8, "rows": 16, "length": 128, "micro": 8, "stages": 2, "steps": 30},
    "saving": {"hidden": 1024, "layers": 17, "rows": 4, "length": 64, "micro": 2, "stages": 1, "steps": 20},
}


def trainer_of(given: argparse.Namespace, output: str, watch: TrainerCallback, **values: Any) -> PipelineTrainer:
    config = llama(given.hidden, given.layers, VOCABULARY, max_position_embeddings=given.length)
    args = PipelineTrainingArguments(
        output_dir=output,
        num_stages=given.stages,
        num_micro_batches=given.micro,
        per_device_train_batch_size=given.rows,
        report_to="none",
        **values,
    )
    rows = random_rows(8 * given.rows, given.length, VOCABULARY)
    return PipelineTrainer(config, args, train_dataset=rows, callbacks=[watch])


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


def overhead(given: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    watch = Stopwatch()
    own = {"max_steps": given.steps, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": False}
    trainer = trainer_of(given, str(folder), watch, **own)
    trainer.optimizer = optimizer = torch.optim.AdamW(trainer.pipe.parameters(), lr=1e-4, fused=True)
    watch.around(Updates, "_update", "update")
    watch.around(Updates, "_clipped", "clipping")
    watch.around(Steps, "_train", "train_on")
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


class Windows(TrainerCallback):
    """Notes when each step ends, and asks for a save at the beginning of every second window."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.ends: list[float] = []
        self.written_after: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())
        control.should_save = (state.global_step - WARM_UP) % (2 * self._steps) == self._steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.written_after.append(len(self.ends) - state.global_step)

    def seconds(self) -> list[float]:
        """How long each window took."""
        ends = self.ends[WARM_UP - 1 :: self._steps]
        return [end - start for start, end in pairwise(ends)]


def saving(given: argparse.Namespace, folder: Path) -> None:
    for how in ("always", "never"):
        windows = Windows(given.steps)
        own = {"save_strategy": "no", "save_total_limit": 1, "save_in_background": how, "logging_steps": 10**6}
        steps = WARM_UP + 2 * given.steps
        trainer = trainer_of(given, str(folder / how), windows, **own, max_steps=steps, disable_tqdm=True)
        trainer.train()
        if not trainer.is_world_process_zero():
            continue
        shutil.rmtree(folder / how, ignore_errors=True)
        without, around = median(windows.seconds()[::2]), median(windows.seconds()[1::2])
        sizes = {"parameters": trainer.pipe.adapter.reference.num_parameters(), "steps": given.steps}
        figures = {"seconds_without": round(without, 3), "seconds_around_a_save": round(around, 3)}
        figures |= {"ratio": round(around / without, 4), "written_after": windows.written_after}
        print(json.dumps({**sizes, "processes": trainer.world.num_processes, "how": how, **figures}), flush=True)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = made.add_subparsers(required=True, dest="what")
    for name, work in (("overhead", overhead), ("saving", saving)):
        of_name = what.add_parser(name, parents=[parser(None, **SIZES[name])], add_help=False)
        of_name.set_defaults(work=work)
    given = made.parse_args()
    work = vars(given).pop("work")
    # The same folder in all processes.
    work(given, Path(tempfile.gettempdir()) / "bench-trainer")


if __name__ == "__main__":
    main()
