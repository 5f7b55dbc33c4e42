"""The split of a model under a limit of memory, against every possible split of models with random layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hf_gpipe.errors import PartitionError
from hf_gpipe.partition import partition as cut
from hf_gpipe.partition import stages_of
from hf_gpipe.planner.costs.model_costs import GraphCost, LayerCost
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.memory import MemoryBound
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.search.cut import choose_partition
from hf_gpipe.planner.workload import PlanInputs, Workload
from tests.partition.test_optimal import all_splits, best
from tests.planner import models

#: The allocator holds more beside working memory than beside graphs, as on GPUs.
DEVICE = replace(models.DEVICE, reserved_share=0.1, reserved_working_share=0.35)


def layer(random: Random, number: int, widest: int) -> LayerCost:
    """A layer with random bytes, at most `widest` of them at its boundary, whose weights autocast may convert."""

    def size() -> int:
        return random.choice((0, 0, 1, 20, random.randrange(400)))

    kind = random.choice(("block", "norm")) if number else "embedding"
    boundary = min(size(), widest) if number else 0
    return replace(
        models.layer(f"h.{number}", kind=kind, weights=4 * size(), flops=random.randrange(9), boundary=boundary),
        forward_working_bytes=size(),
        forward_only_working_bytes=size(),
        plain=GraphCost(size(), size(), size(), size()),
        block=GraphCost(size(), size(), size(), size()),
        converted_bytes=random.choice((0, size())),
    )


def layouts(count: int) -> Iterator[tuple[Random, Layout]]:
    """Random numbers and a layout of 2 to 4 stages of a model of up to 7 random layers."""
    for seed in range(count):
        random = Random(seed)
        num_layers, widest = random.randint(2, 7), random.choice((0, 400))
        costs = models.model(*(layer(random, number, widest) for number in range(num_layers)))
        even = cut(num_layers, random.randint(2, min(num_layers, 4)))
        ways = {"schedule": ("gpipe", "1f1b"), "recompute": ("none", "block", "stage")}
        config = models.settings(
            tuple(map(len, even)), random.randint(1, 4), **{key: random.choice(values) for key, values in ways.items()}
        )
        planner = Planner(lambda *_, costs=costs: [costs], PlanInputs(Workload(4, 1, 1), optim="sgd"), DEVICE)
        yield random, planner.layout(config)


def test_no_other_split_under_a_limit_is_better() -> None:
    """A stage may need less with one more norm, and plans of 4-bit weights ended in an AssertionError."""
    for random, layout in layouts(150):
        check_split(random, layout)


def check_split(random: Random, layout: Layout) -> None:
    """Compare the split under a random limit with the best of all splits."""
    sums, shares, stages = layout.sums, layout.recompute_shares, layout.stages
    bound, num_layers = MemoryBound(layout), len(sums.costs.layers)

    def memory(stage: int, start: int, stop: int) -> float:
        return bound.stage_bytes(stage, stages[stage]._replace(start=start, stop=stop))

    def flops(stage: int, start: int, stop: int) -> float:
        return (1 + shares[stage]) * sums.forward_flops(start, stop) + sums.backward_flops(start, stop)

    needs = [max(memory(*stage) for stage in stages_of(split)) for split in all_splits(num_layers, len(stages))]
    limit = max(int(random.choice(needs)) + random.randint(-3, 4), 1)
    expected = best(num_layers, len(stages), flops, lambda *stage: memory(*stage) <= limit)
    try:
        chosen = choose_partition(layout.processes.within(limit), layout.settings, "flops")
    except PartitionError:
        chosen = None
    assert chosen == expected


def test_a_stage_needs_at_most_a_dip_less_than_its_part() -> None:
    for _, layout in layouts(150):
        bound, num_layers = MemoryBound(layout), len(layout.sums.costs.layers)
        dip = bound.dip_bytes()
        for number, stage in enumerate(layout.stages):
            is_last = number == len(layout.stages) - 1
            starts = range(1, num_layers) if number else range(1)
            ends = range(num_layers if is_last else 1, num_layers + is_last)
            runs = [(start, stop) for start in starts for stop in ends if start < stop]
            needs = {run: bound.stage_bytes(number, stage._replace(start=run[0], stop=run[1])) for run in runs}
            for whole, need in needs.items():
                parts = [size for (start, stop), size in needs.items() if whole[0] <= start and stop <= whole[1]]
                assert max(parts) <= need + dip + 1e-6
