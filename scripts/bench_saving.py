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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments

VOCABULARY, WARM_UP = 8192, 3


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Random tokens, all rows of one length."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


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

    def seconds(self, number: int) -> float:
        """How long a window took."""
        first = WARM_UP + number * self._steps - 1
        return self.ends[first + self._steps] - self.ends[first]


def measure(given: argparse.Namespace, how: str) -> dict[str, Any] | None:
    """Train with one way to save; the figures, in the main process."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 4,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.hidden // 64),
        max_position_embeddings=given.length,
    )
    windows = Windows(given.steps)
    output = given.output / how
    args = PipelineTrainingArguments(
        output_dir=str(output),
        num_stages=given.stages,
        num_micro_batches=given.micro,
        per_device_train_batch_size=given.rows,
        max_steps=WARM_UP + 2 * given.repeats * given.steps,
        save_strategy="no",
        save_total_limit=1,
        save_in_background=how,
        logging_steps=10**6,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PipelineTrainer(config, args, train_dataset=Rows(8 * given.rows, given.length), callbacks=[windows])
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    without = [windows.seconds(number) for number in range(0, 2 * given.repeats, 2)]
    around = [windows.seconds(number) for number in range(1, 2 * given.repeats, 2)]
    return {
        "parameters": trainer.pipe.adapter.reference.num_parameters(),
        "processes": trainer.topology.num_processes,
        "save_in_background": how,
        "steps": given.steps,
        "seconds_without": round(median(without), 3),
        "seconds_around_a_save": round(median(around), 3),
        "ratio": round(median(around) / median(without), 4),
        "written_after": windows.written_after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 1024, "layers": 17, "rows": 4, "length": 64, "micro": 2, "stages": 1, "steps": 20, "repeats": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--how", nargs="+", default=["always", "never"], choices=["always", "never"])
    parser.add_argument(
        "--output", type=Path, default=Path(tempfile.gettempdir()) / "bench-saving", help="where checkpoints are put"
    )
    given = parser.parse_args()
    for how in given.how:
        figures = measure(given, how)
        if figures is not None:
            shutil.rmtree(given.output / how, ignore_errors=True)
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
