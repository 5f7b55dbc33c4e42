"""LoRA on a checkpoint that is larger than the memory, on a CPU: its time and memory.

    python scripts/offload_memory.py DIRECTORY [--stages K] [--rows N] [--tokens T] [--steps S] [--resident]

With `offload_weights` the weights stay in the checkpoint's files, and two stages of them are in memory at once. So the
script also runs where the memory is limited, such as in a cgroup (as root, version 1):

    mkdir /sys/fs/cgroup/memory/small && echo 1300M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
    (echo $BASHPID > /sys/fs/cgroup/memory/small/cgroup.procs && exec python scripts/offload_memory.py DIRECTORY)

`--resident` reads all weights into memory, for a comparison.
"""

from __future__ import annotations

import statistics
import time

import peft
import torch
from bench.machine import status_bytes
from bench.models import random_batch
from bench.runner import parser

from hf_gpipe import Pipeline
from hf_gpipe.text import size_text


def main() -> None:
    made = parser(__doc__, stages=24, rows=4, tokens=64, steps=3)
    made.add_argument("directory")
    made.add_argument("--resident", action="store_true")
    args = made.parse_args()
    adapters = peft.LoraConfig(r=8, target_modules="all-linear")
    pipe = Pipeline(
        args.directory,
        args.stages,
        args.rows,
        "breadth_first",
        "stage",
        peft_config=adapters,
        device="cpu",
        offload_weights=None if args.resident else "frozen",
    )
    batch = random_batch(args.rows, args.tokens, vocabulary=1000)
    optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-3)
    size = sum(p.nbytes for p in pipe.parameters() if not p.requires_grad)
    print(f"weights {size_text(size)}, {args.stages} stages, {args.rows} rows of {args.tokens} tokens")
    seconds = []
    for step in range(args.steps):
        start = time.perf_counter()
        loss = float(pipe.train_step(batch))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        seconds.append(time.perf_counter() - start)
        own = size_text(status_bytes("RssAnon"))
        print(f"step {step}: loss {loss:.6f}, {seconds[-1]:.1f} s, in memory {own}", flush=True)
    middle, peak = statistics.median(seconds), size_text(status_bytes("VmHWM"))
    rate = args.rows * args.tokens / middle
    print(f"median {middle:.1f} s, {rate:.1f} tokens/s; with mapped files {peak}")


if __name__ == "__main__":
    main()
