"""Training on a CPU of a model that is larger than the memory: its time and memory.

    python scripts/offload_memory.py DIRECTORY [--stages K] [--rows N] [--tokens T] [--steps S] [--resident]
    python scripts/offload_memory.py DIRECTORY --state-dir FOLDER

The first trains LoRA. With `offload_weights` the weights stay in the checkpoint's files, and two stages of them are in
memory at once. The second trains all weights in bfloat16, and the optimizer's state and float32 master weights are in
files of the folder (`optimizer_state_dir`). So the script also runs where the memory is limited, such as in a cgroup
(as root, version 1):

    mkdir /sys/fs/cgroup/memory/small && echo 1300M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
    (echo $BASHPID > /sys/fs/cgroup/memory/small/cgroup.procs && exec python scripts/offload_memory.py DIRECTORY)

`--resident` reads all weights into memory, and keeps the state there, for a comparison.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import peft
from bench.machine import status_bytes
from bench.models import random_rows
from bench.runner import parser
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.text import size_text


class Steps(TrainerCallback):
    """Prints the seconds and the memory of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        self.seconds.append(time.perf_counter() - self._start)
        own, files = (size_text(status_bytes(key)) for key in ("RssAnon", "RssFile"))
        text = f"step {state.global_step}: loss {logs['loss']:.6f}, {self.seconds[-1]:.1f} s"
        print(f"{text}, in memory {own}, and {files} of mapped files", flush=True)


def main() -> None:
    made = parser(__doc__, stages=24, rows=4, tokens=64, steps=3)
    made.add_argument("directory")
    made.add_argument("--resident", action="store_true")
    made.add_argument("--state-dir", help="train all weights, with the optimizer's state in files of this folder")
    args = made.parse_args()
    is_full = args.state_dir is not None
    visitors = "all" if is_full else "frozen"
    rows, steps = random_rows(args.rows, args.tokens, vocabulary=1000), Steps()
    with tempfile.TemporaryDirectory() as folder:
        arguments = PipelineTrainingArguments(
            folder,
            num_stages=args.stages,
            num_micro_batches=args.rows,
            schedule="breadth_first",
            recompute="stage",
            offload_weights=None if args.resident else visitors,
            fp32_master_weights=is_full,
            optimizer_state_dir=None if args.resident else args.state_dir,
            per_device_train_batch_size=args.rows,
            max_steps=args.steps,
            learning_rate=1e-5 if is_full else 1e-3,
            weight_decay=0.01,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = PipelineTrainer(
            args.directory,
            arguments,
            train_dataset=rows * args.steps,
            callbacks=[steps],
            peft_config=None if is_full else peft.LoraConfig(r=8, target_modules="all-linear"),
        )
        parameters = list(trainer.pipe.parameters())
        size = sum(p.nbytes for p in parameters if is_full or not p.requires_grad)
        from_training = f", {size_text(16 * sum(p.numel() for p in parameters))} with gradients and state" * is_full
        print(
            f"weights {size_text(size)}{from_training}, {args.stages} stages, {args.rows} rows of {args.tokens} tokens"
        )
        trainer.train()
    middle, peak = statistics.median(steps.seconds), size_text(status_bytes("VmHWM"))
    rate = args.rows * args.tokens / middle
    print(f"median {middle:.1f} s, {rate:.1f} tokens/s; with mapped files {peak}")


if __name__ == "__main__":
    main()
