"""The cost of I and W beside B, and the host time that the executor itself takes for an action.

    python scripts/bench_weight_gradients.py                      4 blocks of a llama of width 384, 2 x 128 tokens
    python scripts/bench_weight_gradients.py --width 1024 --blocks 1 --repetitions 9
    python scripts/bench_weight_gradients.py --host               stages of one tiny block

The first measures F and B of a stage whose weight gradients are autograd's, and F, I and W of the same stage, in turns.
Seconds are medians over the repetitions, with the smallest and the largest; `(I + W) / B` and `F split / F` are of one
repetition each. The gradients of both are compared. The C library is told to keep freed memory: otherwise it gives some
back in each repetition, and I, which keeps more than B, pays for new pages. `page faults` counts them.

`--host` runs steps of one process and takes out what is not the executor's: the forward of the stage's model, the loss,
the products of W, autograd's engine, the channels, and what measuring these costs. What is left, over the number of
actions, are microseconds of the thread's CPU time per action; "beside it" are those of the other parts. One JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from bench import machine
from bench.models import llama, random_batch
from bench.report import Spread
from bench.runner import parser
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.adapters.modules.weight_gradients import Product
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.model.assembly import assemble
from hf_gpipe.runtime import stage as stage_module
from hf_gpipe.runtime.channel import LocalChannel
from hf_gpipe.runtime.cutting import Cutting, make_micro_batches
from hf_gpipe.runtime.micro_batch import Context
from hf_gpipe.runtime.stage import Stage

VOCABULARY = 64
#: Repetitions that do not count: the first ones get their memory from the system.
_WARM_UP = 4


def config_of(width: int, blocks: int) -> LlamaConfig:
    return llama(width, blocks, VOCABULARY, width * 8 // 3 // 8 * 8, heads=max(width // 64, 2))


def middle_stage(config: LlamaConfig) -> Stage:
    """A stage of all blocks, without the embedding, the norm and the head."""
    adapter = adapter_for(config)
    model = assemble(adapter, range(1, len(adapter.layers) - 2), None, torch.device("cpu"))
    return Stage(model, lambda _: {"hidden": True})


def split_costs(given: argparse.Namespace) -> dict[str, Any]:
    config = config_of(given.width, given.blocks)
    whole, split = middle_stage(config), middle_stage(config)
    split.model.defer_weight_gradients()
    batch = random_batch(given.rows, given.length, VOCABULARY)
    (micro_batch,) = make_micro_batches(whole.model.adapter, [batch], Cutting(1), seed=0, step=0)
    hidden, gradient = torch.randn(2, given.rows, given.length, given.width)
    context = Context(micro_batch, {"hidden": hidden})
    faults: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {name: [] for name in ("F", "B", "F split", "I", "W")}
    kept = 0

    def clock(name: str, action: Callable[[], Any]) -> None:
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        action()
        seconds[name].append(time.perf_counter() - start)
        faults[name] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    machine.keep_freed_memory()
    for repetition in range(given.repetitions + _WARM_UP):
        clock("F", lambda: whole.forward(context, keep_graph=True))
        clock("B", lambda: whole.backward(0, {"hidden": gradient}))
        clock("F split", lambda: split.forward(context, keep_graph=True))
        clock("I", lambda: split.input_backward(0, {"hidden": gradient}))
        kept = split.deferred_bytes(0)
        clock("W", lambda: split.weight_backward(0))
        if repetition == _WARM_UP - 1:  # the first one writes the gradients that the others add to
            faults.clear()
            for measured in seconds.values():
                measured.clear()
    pairs = zip(whole.model.parameters.values(), split.model.parameters.values(), strict=True)
    ratios = {
        "(I + W) / B": [(i + w) / b for i, w, b in zip(seconds["I"], seconds["W"], seconds["B"], strict=True)],
        "F split / F": [s / f for s, f in zip(seconds["F split"], seconds["F"], strict=True)],
    }
    return {
        "milliseconds": {name: summary(values, 1e3) for name, values in seconds.items()},
        "ratios": {name: summary(values) for name, values in ratios.items()},
        "of the least values": (min(seconds["I"]) + min(seconds["W"])) / min(seconds["B"]),
        "page faults": {name: round(faults[name] / given.repetitions) for name in seconds},
        "kept MiB": round(kept / 2**20, 2),
        "largest relative difference of a gradient": max(
            float((parameter.grad - other.grad).norm() / parameter.grad.norm()) for parameter, other in pairs
        ),
    }


class Others:
    """Counts the seconds of calls that are not the executor's, by what they are for."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._is_inside = False
        #: What counting a call costs beside what it counts.
        self._counting_seconds = 0.0
        self._counting_seconds = self._measure_counting()

    def restart(self) -> None:
        self.seconds.clear()
        self._calls.clear()

    def in_all(self) -> float:
        """The seconds of the calls since `restart`, and of counting them."""
        return self.seconds.total() + self._calls.total() * self._counting_seconds

    def _measure_counting(self) -> float:
        nothing, times = self.around("", lambda: None), []
        for _ in range(2000):
            self.restart()
            start = time.thread_time()
            nothing()
            times.append(time.thread_time() - start - self.seconds.total())
        return median(times)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - start
                self._calls[part] += 1
                self._is_inside = False

        return timed


#: What a stage's work is made of, beside the executor.
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "the model's forward": ((StageModel, "__call__"),),
    "the loss's forward": ((TokenLoss, "__call__"), (stage_module, "deferred_loss")),
    "W's products": ((Product, "add"),),
    "autograd's engine": ((torch.autograd, "backward"), (torch.Tensor, "backward")),
    "channels": ((LocalChannel, "send"), (LocalChannel, "receive")),
}


def tiny_steps(schedule: str) -> tuple[int, Callable[[], Any]]:
    """The number of actions of a step, and the step: four stages of one tiny block, eight micro-batches."""
    num_stages, num_micro_batches = 4, 8
    pipe = Pipeline(config_of(16, num_stages), num_stages, num_micro_batches, schedule, partition=[2, 1, 1, 3])
    actions = pipe.schedule(num_micro_batches)
    batch = random_batch(num_micro_batches, 8, VOCABULARY)
    micro_batches = make_micro_batches(pipe.adapter, [batch], Cutting(num_micro_batches), seed=0, step=0)

    def step() -> None:
        pipe.steps.executor.run(actions, micro_batches)

    for _ in range(3):
        step()
    return sum(map(len, actions.actions)), step


def host_time(given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per action, by schedule: of the executor, and the medians of the other parts of a step."""
    figures: dict[str, Any] = {}
    others = Others()
    for schedule in given.schedules:
        values, parts = [], []
        count, step = tiny_steps(schedule)
        with ExitStack() as patched:
            for part, calls in PARTS.items():
                for owner, name in calls:
                    patched.enter_context(patch.object(owner, name, others.around(part, getattr(owner, name))))
            for _ in range(10 * given.repetitions):
                others.restart()
                start = time.thread_time()
                step()
                values.append((time.thread_time() - start - others.in_all()) / count)
                parts.append({part: others.seconds[part] / count for part in PARTS})
        medians = {part: round(1e6 * median(step_parts[part] for step_parts in parts), 1) for part in PARTS}
        figures[schedule] = {"actions": count, "microseconds": summary(values, 1e6), "beside it": medians}
    return figures


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """The median, the smallest and the largest."""
    return {
        name: round(value * scale, 3) for name, value in zip(("median", "min", "max"), Spread.of(values), strict=True)
    }


def main() -> None:
    made = parser(__doc__, width=384, blocks=4, rows=2, length=128, repetitions=25)
    made.add_argument("--host", action="store_true", help="measure the executor's host time per action instead")
    made.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"], help="of --host")
    given = made.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(host_time(given) if given.host else split_costs(given)))


if __name__ == "__main__":
    main()
