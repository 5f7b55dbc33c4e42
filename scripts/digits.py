"""Loss and gradient norm of small runs to the last digit, for `diff` between two commits of a change without effect.

Each run is some steps of a tiny model on the CPU: the quickstart's recipe from the command line, and pipelines in one
or several processes that differ in what a step goes through. One line per step: the run, the step, and both numbers as
`float.hex`, so the same commit prints the same lines on the same machine. "causal" also prints tokens that it has
generated.

    python scripts/digits.py > before.txt                           about two minutes
    python scripts/digits.py --runs nf4 dpo | diff <(grep -E '^(nf4|dpo) ' before.txt) -
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_loading import quantisation
from mesh_losses import logged
from peft import LoraConfig

from hf_gpipe import Pipeline
from hf_gpipe.losses.preference import PreferenceLoss
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES
from tests.oracle import padded_batch, plain_model, tiny_config

STEPS, ROWS = 20, 8
#: The recipe runs fewer steps on less data: most of its time goes into making the data, and into the evaluation.
RECIPE_STEPS = 10
RECIPE = ["data.languages=[de,fr]", "data.examples_per_language=100", "tokenizer.vocab_size=400"]


class Run(NamedTuple):
    """Steps of a tiny model with dropout 0.1, where its family has it."""

    processes: int
    family: str
    options: dict[str, Any]


LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
RUNS = {
    "causal": Run(1, "llama", {"num_stages": 2, "schedule": "1f1b", "recompute": "stage"}),
    "dropout": Run(2, "marian", {"num_stages": 4, "num_processes": 2, "recompute": "stage"}),
    "zero": Run(4, "marian", {"num_stages": 2, "replicas": 2, "zero": 1, "schedule": "1f1b"}),
    "nf4": Run(1, "llama", {"num_stages": 2, "quantization_config": quantisation("nf4", "float32"), **LORA}),
    "dpo": Run(2, "llama", {"num_stages": 2, "schedule": "1f1b", "loss": PreferenceLoss(0.5), **LORA}),
    "pipedream": Run(2, "llama", {"num_stages": 2, "schedule": "pipedream"}),
    "zb_h1": Run(2, "llama", {"num_stages": 2, "schedule": "zb_h1"}),
    "packing": Run(1, "marian", {"num_stages": 2, "packing": True, "recompute": [1, "none"]}),
}


def steps(pipe: Pipeline) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    optimizer = torch.optim.AdamW([parameter for parameter in pipe.parameters() if parameter.requires_grad], lr=1e-2)
    if pipe.config.zero:
        pipe.shard_optimizer(optimizer)
    batches = [padded_batch(pipe.adapter.config, ROWS, seed) for seed in range(STEPS)]
    if pipe.schedule_name in ASYNCHRONOUS_SCHEDULES:
        yield from pipe.train_window([[batch] for batch in batches], lambda *_: optimizer.step()).tolist()
        return
    norms: list[float] = []

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        norms.append(float(norm))
        optimizer.step()

    for batch in batches:
        loss = pipe.train_step(batch, update=update)
        pipe.zero_grad()
        yield float(loss), norms[-1]


def work(rank: int, name: str, folder: str) -> None:
    """One process of a run, on the model that lies in `folder`; the first one prints."""
    run = RUNS[name]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=run.processes)
    torch.manual_seed(0)
    pipe = Pipeline(folder, num_micro_batches=4, attn_implementation="sdpa", device="cpu", **run.options)
    for number, (loss, norm) in enumerate(steps(pipe)):
        if rank == 0:
            print(name, number, loss.hex(), norm.hex(), flush=True)
    if name == "causal":
        ids = torch.arange(3, 15).view(2, 6)
        print(name, "tokens", *pipe.generate(input_ids=ids, max_new_tokens=8).flatten().tolist(), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=["recipe", *RUNS], default=["recipe", *RUNS])
    for name in parser.parse_args().runs:
        with tempfile.TemporaryDirectory(prefix="hf_gpipe-digits-") as folder:
            if name == "recipe":
                for number, (loss, norm) in enumerate(logged("D=1 K=2", RECIPE_STEPS, RECIPE, Path(folder))):
                    print(name, number, loss.hex(), norm.hex(), flush=True)
                continue
            config = tiny_config(RUNS[name].family, tied=False, dropout=0.1)
            if name == "nf4":  # wide enough for several blocks of 64 values in a row of a weight
                config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 32})
            plain_model(config, dtype=torch.float32).save_pretrained(folder)
            # Forked, for this process has imported everything and has no other thread.
            mp.start_processes(work, (name, folder), RUNS[name].processes, start_method="fork")


if __name__ == "__main__":
    main()
