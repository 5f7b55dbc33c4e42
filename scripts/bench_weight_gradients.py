"""What I and W cost beside B, and the host time that the executor itself takes for an action.

    python scripts/bench_weight_gradients.py                      4 blocks of a llama of width 384, 2 x 128 tokens
    python scripts/bench_weight_gradients.py --width 1024 --blocks 1 --repetitions 9
    python scripts/bench_weight_gradients.py --host               stages of one tiny block

The first measures F and B of a stage whose weight gradients are autograd's, and F, I and W of the same stage, in turns.
Seconds are medians over the repetitions, with the smallest and the largest; `(I + W) / B` and `F split / F` are of one
repetition each. The gradients of both are compared.

`--host` runs steps of one process and takes out what is not the executor's: the forward of the stage's model, the loss,
the products of W, autograd's engine, and the channels. What is left, over the number of actions, are microseconds of
the thread's CPU time per action. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.adapters.weight_gradients import Product
from hf_gpipe.checkpoint import hub
from hf_gpipe.runtime.channel import LocalChannel
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.micro_batch import Context, make_micro_batches
from hf_gpipe.runtime.stage import Stage

VOCABULARY, HEAD_SIZE = 64, 64


def config_of(width: int, blocks: int) -> LlamaConfig:
    heads = max(width // HEAD_SIZE, 2)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=False,
    )


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def middle_stage(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Stage:
    """A stage of all blocks, without the embedding, the norm and the head."""
    adapter = adapter_for(config, dtype)
    model = StageModel(adapter, 1, len(adapter.layers) - 2)
    hub.initialise(model, device, 0)
    model.seal(device)
    return Stage(model, lambda _: {"hidden": True})


def split_costs(arguments: argparse.Namespace) -> dict[str, Any]:
    config, dtype = config_of(arguments.width, arguments.blocks), getattr(torch, arguments.dtype)
    device = torch.device(arguments.device)
    whole, split = middle_stage(config, dtype, device), middle_stage(config, dtype, device)
    split.model.defer_weight_gradients()
    (micro_batch,) = make_micro_batches(
        whole.model.adapter, [batch_of(arguments.rows, arguments.length)], 1, seed=0, step=0
    )
    hidden, gradient = torch.randn(2, arguments.rows, arguments.length, arguments.width, dtype=dtype, device=device)
    context = Context(micro_batch, {"hidden": hidden})
    seconds: dict[str, list[float]] = {name: [] for name in ("F", "B", "F split", "I", "W")}
    kept = 0

    def clock(name: str, action: Callable[[], Any]) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name].append(time.perf_counter() - start)

    for repetition in range(arguments.repetitions + 1):
        clock("F", lambda: whole.forward(context, keep_graph=True))
        clock("B", lambda: whole.backward(0, {"hidden": gradient}))
        clock("F split", lambda: split.forward(context, keep_graph=True))
        clock("I", lambda: split.input_backward(0, {"hidden": gradient}))
        kept = split.deferred_bytes(0)
        clock("W", lambda: split.weight_backward(0))
        if repetition == 0:  # it writes the gradients that the others add to
            for measured in seconds.values():
                measured.clear()
    pairs = zip(whole.model.parameters.values(), split.model.parameters.values(), strict=True)
    differences = [float((one.grad - other.grad).norm() / one.grad.norm()) for one, other in pairs]
    ratios = {
        "(I + W) / B": [(i + w) / b for i, w, b in zip(seconds["I"], seconds["W"], seconds["B"], strict=True)],
        "F split / F": [s / f for s, f in zip(seconds["F split"], seconds["F"], strict=True)],
    }
    return {
        "milliseconds": {name: summary(values, 1e3) for name, values in seconds.items()},
        "ratios": {name: summary(values) for name, values in ratios.items()},
        "of the least values": (min(seconds["I"]) + min(seconds["W"])) / min(seconds["B"]),
        "kept MiB": round(kept / 2**20, 2),
        "largest relative difference of a gradient": max(differences),
    }


class Others:
    """Counts the seconds of calls that are not the executor's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
                self._is_inside = False

        return timed


def host_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the executor per action, by schedule. K and M are the bench's."""
    num_stages, num_micro_batches = 4, 8
    found: dict[str, Any] = {}
    config = config_of(16, num_stages)
    batch = batch_of(num_micro_batches, 8)
    others = Others()
    calls = [
        (StageModel, "__call__"),
        (TokenLoss, "__call__"),
        (Product, "add"),
        (torch.autograd, "backward"),
        (torch.Tensor, "backward"),
        (LocalChannel, "send"),
        (LocalChannel, "receive"),
    ]
    patches = [patch.object(owner, name, others.around(getattr(owner, name))) for owner, name in calls]
    for schedule in arguments.schedules:
        pipe = Pipeline(config, num_stages, num_micro_batches, schedule, partition=[2, 1, 1, 3])
        table = pipe.schedule(num_micro_batches)
        micro_batches = make_micro_batches(pipe.adapter, [batch], num_micro_batches, seed=0, step=0)
        count = sum(map(len, table.actions))
        values = []
        for one in patches:
            one.start()
        for _ in range(10 * arguments.repetitions):
            pipe.zero_grad()
            others.seconds = 0.0
            start = time.thread_time()
            pipe._executor.run(table, micro_batches)
            values.append((time.thread_time() - start - others.seconds) / count)
        for one in patches:
            one.stop()
        found[schedule] = {"actions": count, "microseconds": summary(values, 1e6)}
    return found


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """The median, the smallest and the largest."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value * scale, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="measure the executor's host time per action instead")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"], help="of --host")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(host_time(arguments) if arguments.host else split_costs(arguments)))


if __name__ == "__main__":
    main()
