"""LoRA on a checkpoint that is larger than the memory, on a CPU: its time and memory.

    python scripts/offload_memory.py DIRECTORY [--stages K] [--rows N] [--tokens T] [--steps S] [--resident]

With `offload_weights` the weights stay in the checkpoint's files, and two stages of them are in memory at once. So the
script also runs where the memory is limited, such as in a cgroup (as root, version 1):

    mkdir /sys/fs/cgroup/memory/small && echo 1300M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
    (echo $BASHPID > /sys/fs/cgroup/memory/small/cgroup.procs && exec python scripts/offload_memory.py DIRECTORY)

`--resident` reads all weights into memory, for a comparison.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path

import peft
import torch

from hf_gpipe import Pipeline
from hf_gpipe.text import size_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--stages", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resident", action="store_true")
    args = parser.parse_args()
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
    ids = torch.randint(3, 1000, (args.rows, args.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
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
        print(
            f"step {step}: loss {loss:.6f}, {seconds[-1]:.1f} s, in memory {size_text(_memory('RssAnon'))}", flush=True
        )
    middle = statistics.median(seconds)
    print(
        f"median {middle:.1f} s, {ids.numel() / middle:.1f} tokens/s; with mapped files {size_text(_memory('VmHWM'))}"
    )


def _memory(name: str) -> int:
    """A line of /proc/self/status in bytes: of the process's own memory, or with the mapped files that are there."""
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


if __name__ == "__main__":
    main()
