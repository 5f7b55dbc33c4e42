"""The cost of a checkpoint for the training: twenty steps around a save beside twenty without one.

    python scripts/bench_saving.py                                             300 million parameters with AdamW
    torchrun --nproc-per-node 2 scripts/bench_saving.py --stages 2             the same over two processes
    python scripts/bench_saving.py --hidden 64 --layers 4 --steps 6            anything smaller

Windows of as many steps follow each other in one training; every second one begins with a save, which deletes the
checkpoint before. One JSON line for each way to save: medians over the windows, and their ratio. `written_after` is
the number of steps after which the checkpoint had its name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.models import llama, random_rows
from bench.runner import parser
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments

VOCABULARY, WARM_UP = 8192, 3


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


def measure(given: argparse.Namespace, how: str, output: str) -> dict[str, Any] | None:
    """Train with one way to save; the figures, in the main process."""
    config = llama(given.hidden, given.layers, VOCABULARY, max_position_embeddings=given.length)
    windows = Windows(given.steps)
    args = PipelineTrainingArguments(
        output_dir=output,
        num_stages=given.stages,
        num_micro_batches=given.micro,
        per_device_train_batch_size=given.rows,
        max_steps=WARM_UP + 2 * given.repeats * given.steps,
        **{"save_strategy": "no", "save_total_limit": 1, "save_in_background": how},
        **{"logging_steps": 10**6, "report_to": "none", "disable_tqdm": True},
    )
    rows = random_rows(8 * given.rows, given.length, VOCABULARY)
    trainer = PipelineTrainer(config, args, train_dataset=rows, callbacks=[windows])
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    without, around = median(windows.seconds()[::2]), median(windows.seconds()[1::2])
    return {
        **{"parameters": trainer.pipe.adapter.reference.num_parameters(), "processes": trainer.world.num_processes},
        **{"save_in_background": how, "steps": given.steps, "seconds_without": round(without, 3)},
        **{"seconds_around_a_save": round(around, 3), "ratio": round(around / without, 4)},
        "written_after": windows.written_after,
    }


def main() -> None:
    sizes = {"hidden": 1024, "layers": 17, "rows": 4, "length": 64, "micro": 2, "stages": 1, "steps": 20, "repeats": 1}
    made = parser(__doc__, **sizes)
    made.add_argument("--how", nargs="+", default=["always", "never"], choices=["always", "never"])
    folder = Path(tempfile.gettempdir()) / "bench-saving"  # the same in all processes
    made.add_argument("--output", type=Path, default=folder, help="where checkpoints are put")
    given = made.parse_args()
    for how in given.how:
        if (figures := measure(given, how, str(given.output / how))) is not None:
            shutil.rmtree(given.output / how, ignore_errors=True)
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
