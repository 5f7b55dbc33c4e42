"""GPipe's Tables 1 and 2 (arXiv 1811.06965), AmoebaNet half: python scripts/amoebanet_tables.py [--table2]

The network is examples/amoebanet.py, in float32 on images of 224 by 224, with RMSProp: 12 bytes a parameter.

Table 1 asks what AmoebaNet-D (L, D) can be trained on accelerators of 8 GB, at a mini-batch of 128 images: Naive-1
without recomputation and micro-batches, Pipeline-K with both, on K accelerators. The paper does not say M; here it is
--micro-batches, and a row says for which M the paper's (L, D) fits in the planner's count. Known error of the printed
table: 24.62 GB of parameters are those of 2.05B, and not of 1.8B.

Table 2 is the throughput of AmoebaNet-D (18, 256) over K and M, normalised to K = 2, M = 1. Real processes run the
table of gpipe over gloo, with stages that wait instead of computing (`bench/emulation.py`). How long they wait is
counted, and no number is fitted: a layer takes its operations at the peak of the accelerator's data sheet, plus the
time of its memory, where each byte that autograd keeps is written and read once in a forward, and twice in a backward.
There are three partitions: the same number of layers in each stage, the fewest parameters in the largest stage, and the
least time of the slowest stage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import torch

from hf_gpipe.adapters.chain import Chain
from hf_gpipe.partition.optimal import by_cost
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import LayerCost, ModelCosts
from hf_gpipe.planner.machines.devices import device
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import Costs, build
from hf_gpipe.settings.pipeline import PipelineConfig

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from amoebanet import amoebanet_d
from bench.emulation import Emulated, emulate

#: Of the whole network for a micro-batch in Table 2, where only ratios count, and what crosses a boundary.
FORWARD_SECONDS, BOUNDARY_BYTES = 0.04, 64 * 1024
GB, ROWS, SIZE, FEW_LAYERS = 10**9, 128, 224, 9
#: Name, K, (L, D), parameters as printed, GB of parameters and of activations.
TABLE1 = (
    ("Naive-1", 1, (18, 208), "82M", 1.05, 6.26),
    ("Pipeline-1", 1, (18, 416), "318M", 3.8, 3.46),
    ("Pipeline-2", 2, (18, 544), "542M", 6.45, 8.11),
    ("Pipeline-4", 4, (36, 544), "1.05B", 12.53, 15.21),
    ("Pipeline-8", 8, (72, 512), "1.8B", 24.62, 26.24),
)
#: By M, for K = 2, 4 and 8.
TABLE2 = {1: (1.0, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)}
PROCESSES = (2, 4, 8)


def images(rows: int) -> Workload:
    """A mini-batch of so many images."""
    entries = (("pixels", (3, SIZE, SIZE), "float32"), ("labels", (), "int64"))
    return Workload(rows, 1, 1, has_padding=False, entries=entries)


@cache
def tracer(num_filters: int) -> LayerTracer:
    """Of the network with three normal cells in each group: further cells are like the third."""
    with torch.device("meta"):
        network = amoebanet_d(FEW_LAYERS, num_filters)
    return LayerTracer(Chain(network, images(2).shapes), as_on_gpu=True)


@cache
def costs(num_layers: int, num_filters: int, rows: int) -> ModelCosts:
    """Of a micro-batch of so many images."""
    few = tracer(num_filters).costs(images(rows))
    stem, head = few.layers[:3], few.layers[-1]
    layers = list(stem)
    for first in range(2, len(few.layers) - 1, 4):
        group = few.layers[first : first + 4]
        layers += group[first == 2 :] + group[-1:] * ((num_layers - FEW_LAYERS) // 3)
    named = [replace(layer, name=f"{number}.{layer.name}") for number, layer in enumerate([*layers, head])]
    return replace(few, layers=tuple(named))


def planner(sizes: tuple[int, int], rows: int) -> Planner:
    """The planner of a mini-batch of so many images, without a limit of memory."""
    made = Planner(lambda own, _: [costs(*sizes, own)], PlanInputs(images(rows), "rmsprop"), device("tpu-v3"))
    return made.within(None)


def plan(name: str, num_stages: int, sizes: tuple[int, int], micro_batches: int) -> Plan:
    """The plan of a row of Table 1, whether it fits or not."""
    count, recompute = (1, "none") if name.startswith("Naive") else (micro_batches, "stage")
    config = PipelineConfig(num_stages, count, "gpipe", recompute, "auto")
    return best_plan(planner(sizes, ROWS), config)


def table1(micro_batches: Sequence[int]) -> None:
    """Print Table 1: memory in GB, over all devices and of the fullest one."""
    print(
        "| | (L, D) | parameters, paper | here | their GB, paper | here | M | activation GB, paper | here | peak GB |"
    )
    print("|" + "---|" * 10)
    for name, num_stages, sizes, printed, weights, activations in TABLE1:
        for count in micro_batches[:1] if name.startswith("Naive") else micro_batches:
            result = plan(name, num_stages, sizes, count)
            parts = [process.memory for process in result.processes]
            own = sum(part.total - part.parameters - part.gradients - part.optimizer for part in parts)
            print(
                f"| {name} | {sizes} | {printed} | {result.costs.total.count / 1e6:.1f}M | {weights} | "
                f"{sum(3 * part.parameters for part in parts) / GB:.2f} | {result.settings.num_micro_batches} | "
                f"{activations} | {own / GB:.2f} | {result.peak_bytes / GB:.2f} |",
                flush=True,
            )


def naive_rows() -> int:
    """How many images of a mini-batch fit with Naive-1 into 8 GB, in fours."""
    _, num_stages, sizes, *_ = TABLE1[0]
    config = PipelineConfig(num_stages, 1, "gpipe", "none")
    fits = [rows for rows in range(4, 33, 4) if best_plan(planner(sizes, rows), config).peak_bytes <= 8 * GB]
    return max(fits, default=0)


def layer_seconds(layers: Sequence[LayerCost]) -> list[float]:
    """Of each layer's forward; a backward takes twice as long."""
    accelerator, forward_moves = device("tpu-v3"), 2
    return [
        layer.forward.flops / accelerator.flops_for("float32")
        + forward_moves * (layer.plain.saved_bytes + layer.plain.saved_input_bytes) / accelerator.bytes_per_second
        for layer in layers
    ]


def stage_seconds(layers: Sequence[LayerCost], num_stages: int, partition: str) -> list[float]:
    """Of each stage's forward.

    Args:
        layers: of the network.
        num_stages: K.
        partition: what the largest stage has the least of: layers, parameters or time.
    """
    seconds = layer_seconds(layers)
    weights = {"layers": [1] * len(layers), "parameters": [layer.parameters.count for layer in layers], "time": seconds}
    total = [0, *accumulate(weights[partition])]
    counts = by_cost(len(layers), num_stages, lambda stage, start, stop: total[stop] - total[start])
    ends = [0, *accumulate(counts)]
    return [sum(seconds[start:stop]) for start, stop in pairwise(ends)]


def emulated(layers: Sequence[LayerCost], num_stages: int, micro_batches: int, partition: str) -> Emulated:
    """A cell of Table 2, whose whole network takes FORWARD_SECONDS for the forward of a micro-batch."""
    of_stages = stage_seconds(layers, num_stages, partition)
    forward = [FORWARD_SECONDS * seconds / sum(of_stages) for seconds in of_stages]
    backward = [2 * seconds for seconds in forward]
    return Emulated(build("gpipe", num_stages, micro_batches), Costs(forward, backward), BOUNDARY_BYTES)


def table2(rows: int, steps: int) -> None:
    """Print Table 2: images a second over those of K = 2, M = 1, the median of so many steps."""
    layers = costs(18, 256, rows).layers
    for partition in ("layers", "parameters", "time"):
        cells = {(k, m): emulated(layers, k, m, partition) for k in PROCESSES for m in TABLE2}
        cell_steps = dict(zip(cells, emulate([*cells.values()], steps), strict=True))
        rates = {(k, m): m / median(step.seconds for step in own) for (k, m), own in cell_steps.items()}
        print(f"\n| partition: {partition} |" + "".join(f" K = {k} | table | paper |" for k in PROCESSES))
        print("|" + "---|" * (1 + 3 * len(PROCESSES)))
        simulated = {(k, m): m / cell.predicted_seconds for (k, m), cell in cells.items()}
        for m, paper in TABLE2.items():
            texts = [
                f"{rates[k, m] / rates[2, 1]:.2f} | {simulated[k, m] / simulated[2, 1]:.2f} | {printed:g}"
                for k, printed in zip(PROCESSES, paper, strict=True)
            ]
            print(f"| M = {m} | " + " | ".join(texts) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[128, 32], help="values of M in Table 1")
    parser.add_argument("--table2", action="store_true", help="print Table 2 in place of Table 1")
    parser.add_argument("--rows", type=int, default=4, help="images of a micro-batch in Table 2")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each cell of Table 2")
    options = parser.parse_args(argv)
    if options.table2:
        return table2(options.rows, options.steps)
    table1(options.micro_batches)
    print(f"\nOf Naive-1 {naive_rows()} of the {ROWS} images fit into 8 GB.")


if __name__ == "__main__":
    main()
