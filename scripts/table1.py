"""GPipe's Table 1, Transformer half, from the planner: python scripts/table1.py

The table (GPipe, arXiv 1811.06965, section 3) asks how many layers L of a Transformer with d = 2048, feed-forward 8192,
32 heads, 32000 tokens of vocabulary and sequences of 1024 can be trained on accelerators of 16 GiB, at a mini-batch of
32 rows and 12 bytes a parameter (float32 weights, gradients and one RMSProp slot): Naive-1 without recomputation and
micro-batches, Pipeline-K with both, on K accelerators.

Known error of the printed table: the two memory cells of Naive-1 are swapped, for 282.2M parameters of 12 bytes are
3.15 GiB. ("25x", which is 22x, is in its other half, and 298 times as many parameters on 128 accelerators is right.)

Where the model here differs from the paper's:
- It is transformers' GPT-2 with an untied head, whose layers are the paper's (12 d^2 + 13 d each). GPT-2 has a table of
  1024 positions (2.1M parameters) where the paper's positions have none, and its head no bias (32k): so the parameters
  printed are those of the formula, and the planner's count stands beside them.
- Attention keeps no (T, T) matrix, as on GPUs today. The paper does not say what its own kept.
- Activations are in bfloat16 (autocast, as TPUs compute).
- The paper does not say M; here each micro-batch is one row, M = 32, the leanest there is.
- L is the largest for which some split into K stages fits by the planner's estimate, the allocator's reserve included.
- The loss is computed in chunks of positions. The logits of Naive-1's 32 rows, their log-probabilities and the gradient
  would be 3.9 GiB each in float32, and no layer would fit beside them.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from transformers import GPT2Config

from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules.autocast import Autocast
from hf_gpipe.errors import PartitionError
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.machines.devices import device
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.settings.pipeline import PipelineConfig

WIDTH, VOCABULARY, LENGTH, ROWS, GIB = 2048, 32000, 1024, 32, 1 << 30
#: Name, K, and the paper's L, parameters as printed, GiB of parameters and of activations (those of Naive-1 unswapped).
PAPER = (
    ("Naive-1", 1, 3, "282.2M", 3.15, 11.7),
    ("Pipeline-1", 1, 13, "785.8M", 8.8, 6.4),
    ("Pipeline-8", 8, 103, "5.3B", 59.5, 50.9),
    ("Pipeline-32", 32, 415, "21.0B", 235.1, 199.9),
    ("Pipeline-128", 128, 1663, "83.9B", 937.9, 796.1),
)


def formula(num_layers: int) -> int:
    """Parameters of the paper's model: untied input table and biased softmax, L layers, a last norm."""
    return 2 * VOCABULARY * WIDTH + VOCABULARY + num_layers * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH


def printed(count: int) -> str:
    """A number of parameters to the digits that the paper prints."""
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.1f}M"


class Model:
    """The costs of the model of any depth, from those of a shallow one: its layers in the middle are alike."""

    def __init__(self) -> None:
        sizes = {"n_layer": 3, "n_embd": WIDTH, "n_head": 32, "n_inner": 8192, "vocab_size": VOCABULARY}
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(**sizes, n_positions=LENGTH, tie_word_embeddings=False, **tokens)
        autocast = Autocast(torch.bfloat16, torch.device("cpu"))
        tracer = LayerTracer(adapter_for(config, autocast=autocast), as_on_gpu=True)
        self._shallow = cache(lambda rows: tracer.costs(Workload(rows, LENGTH, LENGTH, has_padding=False)))

    def costs(self, rows: int, num_layers: int) -> ModelCosts:
        """Of one micro-batch of `rows`."""
        shallow: ModelCosts = self._shallow(rows)
        first, block, *_, norm, head = shallow.layers
        blocks = tuple(replace(block, name=f"transformer.h.{index}") for index in range(num_layers))
        return replace(shallow, layers=(first, *blocks, norm, head))

    def plan(self, name: str, num_stages: int, num_layers: int, *, is_limited: bool = True) -> Plan:
        """The plan of a row of the table. Raises PartitionError where no split fits and that matters."""
        inputs = PlanInputs(Workload(ROWS, LENGTH, LENGTH, has_padding=False), "rmsprop")
        planner = Planner(lambda rows, _: [self.costs(rows, num_layers)], inputs, device("tpu-v3"), 16 * GIB)
        count, recompute = (1, "none") if name.startswith("Naive") else (ROWS, "stage")
        config = PipelineConfig(num_stages, count, "gpipe", recompute, "auto")
        return best_plan(planner if is_limited else planner.within(None), config)

    def fits(self, name: str, num_stages: int, num_layers: int) -> bool:
        """Whether that many layers fit."""
        try:
            return self.plan(name, num_stages, num_layers).fits
        except PartitionError:
            return False

    def most_layers(self, name: str, num_stages: int) -> int:
        """The largest L that fits, 0 where none does. Where the layers are fewer than the stages, more may fit."""
        every = range(1, 4 * PAPER[-1][2])
        return bisect_left(every, True, key=lambda n: n + 3 >= num_stages and not self.fits(name, num_stages, n))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 8, 32, 128], help="values of K")
    options = parser.parse_args(argv)
    model = Model()
    print(
        "| | L, paper | parameters, paper | by formula | planner's model | parameter GiB, paper | planner "
        "| activation GiB, paper | planner | L, planner | GiB a device |"
    )
    print("|" + "---|" * 11)
    for name, num_stages, paper_layers, paper_count, paper_weights, paper_activations in PAPER:
        if num_stages not in options.stages:
            continue
        parameters = model.costs(1, paper_layers).total
        processes = model.plan(name, num_stages, paper_layers, is_limited=False).processes
        estimates = [process.memory for process in processes]
        # What autocast makes of the weights counts as activations.
        activations = sum(one.total - one.gradients - one.optimizer for one in estimates) - parameters.num_bytes
        most = model.most_layers(name, num_stages)
        peak = f"{model.plan(name, num_stages, most).peak_bytes / GIB:.2f}" if most else "none fits"
        print(
            f"| {name} | {paper_layers} | {paper_count} | {printed(formula(paper_layers))} | "
            f"{printed(parameters.count)} | {paper_weights} | {3 * parameters.num_bytes / GIB:.2f} | "
            f"{paper_activations} | {activations / GIB:.2f} | {most} | {peak} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
