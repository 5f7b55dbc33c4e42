"""Time of a step of a llama in two processes on this CPU: divided layers, stages, and transformers' own `tp_plan`.

The same model, rows and micro-batches; float32, without dropout, eager attention, gloo, one thread a process. All runs
take turns, and the table has the median of the steps. transformers runs a loop over the micro-batches with its own
loss.

    python scripts/bench_tensor_parallel.py
    python scripts/bench_tensor_parallel.py --width 1024 --layers 4
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench.report import table
from bench.runner import parser
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_gpipe import Pipeline

ROWS, TOKENS, MICRO_BATCHES, VOCABULARY = 8, 128, 4, 8000


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def of_pipeline(directory: str, **options: Any) -> Callable[[], Any]:
    """A step of ours, with the gradients in `.grad`."""
    pipe = Pipeline(
        directory, num_micro_batches=MICRO_BATCHES, recompute="none", attn_implementation="eager", **options
    )
    rows = batch()

    def step() -> Any:
        pipe.zero_grad()
        pipe.train_step(rows)
        return pipe

    return step


def of_transformers(directory: str, **options: Any) -> Callable[[], Any]:
    """A step of transformers' model, in a loop over the micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", **options).train()
    parts = {name: tensor.chunk(MICRO_BATCHES) for name, tensor in batch().items()}
    rows = [{name: own[number] for name, own in parts.items()} for number in range(MICRO_BATCHES)]

    def step() -> Any:
        model.zero_grad()
        for row in rows:
            (model(**row, use_cache=False).loss / MICRO_BATCHES).backward()
        return model

    return step


def work(rank: int, folder: str, directory: str, num_steps: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    steps = {
        "ours, T=2": of_pipeline(directory, num_stages=1, tensor_parallel=2, schedule="gpipe"),
        "ours, K=2, 1f1b": of_pipeline(directory, num_stages=2, schedule="1f1b"),
        "transformers, tp_plan": of_transformers(directory, tp_plan="auto"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_steps + 2):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        rows = [
            [name, f"{statistics.median(own):.3f}", f"{min(own):.3f}", f"{max(own):.3f}"]
            for name, own in seconds.items()
        ]
        Path(folder, "table").write_text(table(["two processes", "median s", "min", "max"], rows))
    dist.destroy_process_group()


def main() -> int:
    made = parser(__doc__, steps=7)
    made.add_argument("--width", type=int, default=512, help="of the hidden states")
    made.add_argument("--layers", type=int, default=6)
    options = made.parse_args()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = f"{folder}/model"
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        mp.spawn(work, (folder, directory, options.steps), 2)
        print(Path(folder, "table").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
