"""An uneven replication that beats every uniform one: python scripts/uneven_replication.py

pythia-70m has a head of 50304 tokens, which is 67% of all seconds and cannot be divided: a pipeline with one worker per
stage waits for it. Data parallelism reduces all 70M gradients over a slow link. 1-2 has two workers for the head and
the blocks next to it, and reduces their gradients alone.

Layers are priced by the planner for one row of 2048 tokens a micro-batch, in bfloat16 autocast. Each replication of the
devices gets the split with the least ceil(M/r) t + G on its slowest stage. Then its tables of 1f1b, gpipe and
gpipe_fused are simulated, and the fastest counts. No memory limit, no recomputation, free updates; every edge has a
link of its own. With --run the fastest table of the uneven and of the best uniform replication also run: the real
executor, channels and reductions in as many processes, on stages that wait as long as they would compute and links
that take as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise
from math import ceil
from statistics import median

import torch
from bench.emulation import Emulated, emulate
from bench.report import paired
from transformers import GPTNeoXConfig

from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules.autocast import Autocast
from hf_gpipe.partition import by_cost, stages_of
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.machines.devices import LINKS, device
from hf_gpipe.planner.workload import Workload
from hf_gpipe.schedule.builders import build
from hf_gpipe.schedule.simulate import Costs, simulate

SCHEDULES = ("1f1b", "gpipe", "gpipe_fused")
LENGTH = 2048


@dataclass(frozen=True, order=True)
class Step:
    """A simulated step; the first fields order it."""

    seconds: float
    replicas: tuple[int, ...]
    counts: tuple[int, ...]
    schedule: str
    emulated: Emulated = field(compare=False)

    def __str__(self) -> str:
        counts = "+".join(str(count) for count in self.counts)
        return f"{'-'.join(str(r) for r in self.replicas)} ({counts} layers, {self.schedule}) {self.seconds:.3f} s"


#: The configuration of EleutherAI/pythia-70m.
PYTHIA_70M = {
    **{"vocab_size": 50304, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"intermediate_size": 2048, "max_position_embeddings": LENGTH, "tie_word_embeddings": False},
}


def replications(num_devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give all devices to stages."""
    for cuts in chain.from_iterable(combinations(range(1, num_devices), n) for n in range(num_devices)):
        yield tuple(after - before for before, after in pairwise((0, *cuts, num_devices)))


def step(sums: StageCosts, replicas: Sequence[int], num_micro_batches: int, link: Level) -> Step:
    """The fastest schedule of one replication."""

    def seconds(start: int, stop: int) -> float:
        return sums.seconds(start, stop, "none").of_micro_batch()

    def reduction(start: int, stop: int, r: int) -> float:
        size = sums.held(start, stop).trainable_bytes
        return 2 * (r - 1) * link.seconds(size / r) if r > 1 else 0.0

    layers = sums.costs.layers
    counts = by_cost(
        len(layers),
        len(replicas),
        lambda s, i, j: ceil(num_micro_batches / replicas[s]) * seconds(i, j) + reduction(i, j, replicas[s]),
    )
    stages = stages_of(counts)
    of_stages = [sums.seconds(i, j, "none") for _, i, j in stages]
    costs = Costs(
        forward_seconds=[stage.forward for stage in of_stages],
        backward_seconds=[stage.backward for stage in of_stages],
        transfer_seconds=[link.seconds(layers[i].input_bytes) for _, i, _ in stages[1:]],
        reduce_seconds=[reduction(i, j, replicas[s]) for s, i, j in stages],
    )
    steps = []
    for name in SCHEDULES:
        table = build(name, len(replicas), num_micro_batches, recompute="none", replicas=list(replicas))
        total = float(simulate(table, costs).total_seconds)
        steps.append(Step(total, tuple(replicas), counts, name, Emulated(table, costs)))
    return min(steps)


def main() -> None:
    """Print the best uneven and every uniform replication."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=int, default=0, metavar="STEPS", help="also run this many steps of the two best")
    num_steps = parser.parse_args().run
    adapter = adapter_for(GPTNeoXConfig(**PYTHIA_70M), autocast=Autocast(torch.bfloat16, torch.device("cpu")))
    costs = LayerTracer(adapter, as_on_gpu=True).costs(Workload(1, LENGTH, LENGTH, has_padding=False))
    sums, link = StageCosts(costs, device("l4")), LINKS["ethernet-10"]
    seconds = (sums.seconds(i, i + 1, "none").of_micro_batch() for i in range(len(costs.layers)))
    milliseconds = " ".join(f"{1e3 * duration:.2f}" for duration in seconds)
    for num_devices, num_micro_batches in ((3, 96), (4, 48)):
        steps = sorted(step(sums, replicas, num_micro_batches, link) for replicas in replications(num_devices))
        uneven = next(candidate for candidate in steps if len(set(candidate.replicas)) > 1)
        uniform = [candidate for candidate in steps if len(set(candidate.replicas)) == 1]
        print(f"{num_devices} l4 on ethernet-10, M = {num_micro_batches} rows of {LENGTH} tokens")
        print(f"  layers, ms a micro-batch: {milliseconds}")
        print(f"  uneven   {uneven}")
        for candidate in uniform:
            print(f"  uniform  {candidate}, {candidate.seconds / uneven.seconds:.2f} times as long", flush=True)
        if num_steps:
            settings = [candidate.emulated for candidate in (uneven, uniform[0])]
            runs = [[run.seconds for run in own] for own in emulate(settings, num_steps)]
            for name, own in zip(("uneven ", "uniform"), runs, strict=True):
                print(f"  run, {name} {median(own):.3f} s (" + " ".join(f"{duration:.3f}" for duration in own) + ")")
            print(f"  run, uniform over uneven: {paired(runs[1], runs[0]).median:.2f}")


if __name__ == "__main__":
    main()
