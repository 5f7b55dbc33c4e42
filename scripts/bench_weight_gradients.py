"""What I and W cost beside B, and the host time that the executor itself takes for an action.

    python scripts/bench_weight_gradients.py                      4 blocks of a llama of width 384, 2 x 128 tokens
    python scripts/bench_weight_gradients.py --width 1024 --blocks 1 --repetitions 9
    python scripts/bench_weight_gradients.py --host               stages of one tiny block
    python scripts/bench_weight_gradients.py --profile            the same stages: a table of what the host does

The first measures F and B of a stage whose weight gradients are autograd's, and F, I and W of the same stage, in turns.
Seconds are medians over the repetitions, with the smallest and the largest; `(I + W) / B` and `F split / F` are of one
repetition each. The gradients of both are compared. Each stage has run the forward of the next micro-batch before, as
in the tables: with no other graph alive the C library would give the memory back after each repetition, and every page
that I keeps would be new. `page faults` counts such pages.

`--host` runs steps of one process and takes out what is not the executor's: the forward of the stage's model, the loss,
the products of W, autograd's engine, the channels, and what measuring these costs. What is left, over the number of
actions, are microseconds of the thread's CPU time per action. One JSON line.

`--profile` runs the same steps under cProfile and prints the time by who spends it, and the project's functions in
which most of it is spent. The profiler makes short Python functions look dearer than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from bench.report import table
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.adapters.weight_gradients import Product
from hf_gpipe.checkpoint import hub
from hf_gpipe.runtime import stage as stage_module
from hf_gpipe.runtime.channel import LocalChannel
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.micro_batch import Context, make_micro_batches
from hf_gpipe.runtime.stage import Stage

VOCABULARY, HEAD_SIZE = 64, 64
#: Repetitions that do not count: the first ones get their memory from the system.
_WARM_UP = 4


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
    contexts = [Context(replace(micro_batch, index=index), {"hidden": hidden}) for index in range(2)]
    faults: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {name: [] for name in ("F", "B", "F split", "I", "W")}
    kept = 0

    def clock(name: str, action: Callable[[], Any]) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name].append(time.perf_counter() - start)
        faults[name] += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for stage in (whole, split):
        stage.forward(contexts[1], keep_graph=True)
    for repetition in range(arguments.repetitions + _WARM_UP):
        now, earlier = contexts[repetition % 2], 1 - repetition % 2
        for stage, names in ((whole, ("F", "B")), (split, ("F split", "I", "W")))[:: -1 if repetition % 4 > 1 else 1]:
            clock(names[0], partial(stage.forward, now, keep_graph=True))
            if stage is whole:
                clock("B", partial(stage.backward, earlier, {"hidden": gradient}))
                continue
            clock("I", partial(stage.input_backward, earlier, {"hidden": gradient}))
            kept = stage.deferred_bytes(earlier)
            clock("W", partial(stage.weight_backward, earlier))
        if repetition == _WARM_UP - 1:  # the first one writes the gradients that the others add to
            faults.clear()
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
        "page faults": {name: round(faults[name] / arguments.repetitions) for name in seconds},
        "kept MiB": round(kept / 2**20, 2),
        "largest relative difference of a gradient": max(differences),
    }


class Others:
    """Counts the seconds of calls that are not the executor's."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self._is_inside = False
        self._own_seconds = 0.0
        self._own_seconds = self._measure_own_seconds()

    def restart(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def in_all(self) -> float:
        """The seconds of the calls since `restart`, and of counting them."""
        return self.seconds + self.calls * self._own_seconds

    def _measure_own_seconds(self) -> float:
        """What counting a call costs beside what it counts."""
        nothing, times = self.around(lambda: None), []
        for _ in range(2000):
            self.restart()
            start = time.thread_time()
            nothing()
            times.append(time.thread_time() - start - self.seconds)
        return median(times)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            self.calls += 1
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start
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


@contextmanager
def tiny_steps(schedule: str) -> Iterator[tuple[int, Callable[[], Any]]]:
    """The number of actions of a step, and the step: four stages of one tiny block, eight micro-batches."""
    num_stages, num_micro_batches = 4, 8
    pipe = Pipeline(config_of(16, num_stages), num_stages, num_micro_batches, schedule, partition=[2, 1, 1, 3])
    table = pipe.schedule(num_micro_batches)
    batch = batch_of(num_micro_batches, 8)
    micro_batches = make_micro_batches(pipe.adapter, [batch], num_micro_batches, seed=0, step=0)

    def step() -> None:
        pipe._executor.run(table, micro_batches)

    for _ in range(3):
        step()
    yield sum(map(len, table.actions)), step


def host_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the executor per action, by schedule."""
    found: dict[str, Any] = {}
    others = Others()
    for schedule in arguments.schedules:
        values = []
        with tiny_steps(schedule) as (count, step), ExitStack() as patched:
            for owner, name in (one for calls in PARTS.values() for one in calls):
                patched.enter_context(patch.object(owner, name, others.around(getattr(owner, name))))
            for _ in range(10 * arguments.repetitions):
                others.restart()
                start = time.thread_time()
                step()
                values.append((time.thread_time() - start - others.in_all()) / count)
        found[schedule] = {"actions": count, "microseconds": summary(values, 1e6)}
    return found


def host_profile(schedule: str, repetitions: int, lines: int = 24) -> str:
    """Where the host's time of a step goes, in microseconds per action, as two tables in Markdown."""
    with tiny_steps(schedule) as (count, step):
        profile = cProfile.Profile()
        for _ in range(repetitions):
            profile.runcall(step)
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    scale = 1e6 / repetitions / count
    code = {
        getattr(owner, name).__code__: part
        for part, calls in PARTS.items()
        for owner, name in calls
        if hasattr(getattr(owner, name), "__code__")
    }
    parts: Counter[str] = Counter()
    own = []
    whole = next(cumulative for (_, _, name), (*_, cumulative, _) in functions.items() if name == "step") * scale
    for (file, line, name), (_, calls, itself, cumulative, _) in functions.items():
        for one, part in code.items():
            if (one.co_filename, one.co_firstlineno) == (file, line):
                parts[part] += cumulative * scale
        if "hf_gpipe/" in file and "scripts" not in file:
            place = file.rpartition("hf_gpipe/")[2]
            own.append((itself * scale, cumulative * scale, calls / repetitions / count, f"`{place}` {name}"))
    parts["executor and stages: the rest"] = whole - sum(parts.values())
    shares = [[part, f"{spent:.0f}", f"{spent / whole:.0%}"] for part, spent in parts.most_common()]
    rows = [[place, f"{each:.2f}", f"{itself:.1f}", f"{total:.1f}"] for itself, total, each, place in sorted(own)[::-1]]
    header = ["function", "calls", "own us", "with all it calls"]
    return "\n\n".join([table([schedule, "us per action", "share"], shares), table(header, rows[:lines])])


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    """The median, the smallest and the largest."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value * scale, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", action="store_true", help="measure the executor's host time per action instead")
    parser.add_argument("--profile", action="store_true", help="print where the host's time of a step goes")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"], help="of --host and --profile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.profile:
        for schedule in arguments.schedules:
            print(host_profile(schedule, arguments.repetitions), "\n")
        return
    print(json.dumps(host_time(arguments) if arguments.host else split_costs(arguments)))


if __name__ == "__main__":
    main()
