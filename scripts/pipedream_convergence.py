"""The cost of late gradients: the loss of PipeDream's schedules beside that of 1f1b, whose gradients are not late.

    python scripts/pipedream_convergence.py recipes/quickstart.yaml --out convergence.jsonl

trains a narrow model of the quickstart in four stages in this process: each of `CASES` with each learning rate and
seed, one after another, with one micro-batch per update where the case says nothing else. All cases of a rate and a
seed have the same first weights and the same rows. A run that is in the file is not repeated, so the script may be
stopped and started again. Only updates are compared here: a single process has no pipeline that could save time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from bench.report import table

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.from_recipe.checks import loss_of
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.from_recipe.processors import tokenizer_of
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.from_recipe.trainer import arguments_of
from hf_gpipe.recipe import load_recipe

#: Of all runs. Embedding and head are on different stages, which an asynchronous schedule trains apart.
SMALL = (
    *("model.config.tie_word_embeddings=false", "model.config.share_encoder_decoder_embeddings=false"),
    *("model.config.d_model=64", "model.config.encoder_ffn_dim=128", "model.config.decoder_ffn_dim=128"),
    *("pipeline.num_stages=4", "pipeline.num_processes=1", "pipeline.device=cpu", "pipeline.num_micro_batches=1"),
    *("pipeline.recompute=none", "training.max_steps=400", "training.warmup_steps=40", "training.batch_size=32"),
    *("training.logging_steps=50", "training.eval_steps=null", "training.save_steps=null"),
    "training.on_nonfinite_loss=ignore",
)
#: The synchronous schedule first. The last ones are remedies: fewer updates in flight, and a longer warm-up.
CASES: dict[str, tuple[str, ...]] = {
    "1f1b": ("pipeline.schedule=1f1b",),
    "pipedream": ("pipeline.schedule=pipedream",),
    "pipedream_vertical": ("pipeline.schedule=pipedream_vertical",),
    "pipedream_2bw": ("pipeline.schedule=pipedream_2bw",),
    "pipedream_naive": ("pipeline.schedule=pipedream_naive",),
    "pipedream, M = 4": ("pipeline.schedule=pipedream", "pipeline.num_micro_batches=4"),
    "pipedream, 2 stages": ("pipeline.schedule=pipedream", "pipeline.num_stages=2"),
    "pipedream, long warm-up": ("pipeline.schedule=pipedream", "training.warmup_steps=160"),
}


class Data:
    """The corpus, the tokenizer and the rows, which all runs share."""

    def __init__(self, recipe_file: str, overrides: Sequence[str]) -> None:
        recipe = load_recipe(recipe_file, overrides)
        task = task_of(recipe)
        corpus = task.corpus(recipe)
        self.tokenizer = tokenizer_of(recipe, corpus)
        self.train, self.validation = (
            task.rows(recipe, split, self.tokenizer) for split in (corpus.train, corpus.validation)
        )


def train(recipe_file: str, overrides: Sequence[str], data: Data) -> dict[str, Any]:
    """One training: the mean loss between two logs, by the step of the log, and the loss on held-out pairs after it."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(recipe_file, [*overrides, f"training.output_dir={folder}"])
        config = model_config(recipe, data.tokenizer)
        pipe = Pipeline(config, config=recipe.pipeline, seed=recipe.training.seed, loss=loss_of(recipe))
        trainer = PipelineTrainer(
            pipe,
            arguments_of(recipe),
            PairCollator.for_tokenizer(data.tokenizer),
            processing_class=data.tokenizer,
            train_dataset=data.train,
            eval_dataset=data.validation,
        )
        trainer.train()
        losses = {str(logs["step"]): logs["loss"] for logs in trainer.state.log_history if "loss" in logs}
        held_out = trainer.evaluate()["eval_loss"]
    return {"losses": losses, "held_out": held_out, "seconds": time.perf_counter() - began}


def report(results: Sequence[dict[str, Any]], common: float) -> str:
    """Of each case the loss at the common learning rate and at the best of its own, over the seeds."""
    losses: dict[str, dict[float, list[dict[str, Any]]]] = {}
    for result in results:
        losses.setdefault(result["case"], {}).setdefault(result["rate"], []).append(result)

    def held_out(runs: Sequence[dict[str, Any]]) -> float:
        # A diverged run has no loss to compare.
        values = [run["held_out"] for run in runs]
        return mean(values) if all(map(math.isfinite, values)) else math.inf

    def spread(values: Sequence[float]) -> str:
        return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    steps = sorted({int(step) for result in results for step in result["losses"]})
    shown = [step for step in steps if step in {steps[-1] // 4, steps[-1] // 2, steps[-1]}]
    rows = []
    for case, by_rate in losses.items():
        best = min(by_rate, key=lambda rate: held_out(by_rate[rate]))
        for rate in dict.fromkeys([common, best]):
            if runs := by_rate.get(rate):
                cells = [spread([run["losses"][str(step)] for run in runs]) for step in shown]
                cells += [spread([run["held_out"] for run in runs]), "best" if rate == best else ""]
                rows.append([case, f"{rate:g}", *cells])
    return table(["case", "rate", *(f"loss at {step}" for step in shown), "held out", ""], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe, for all runs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-3, 1e-3, 4e-3], help="the first is common to all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("convergence.jsonl"), help="a line for each run")
    arguments = parser.parse_intermixed_args(argv)
    common = [*SMALL, *arguments.overrides]
    wanted = [(case, rate, seed) for rate in arguments.rates for seed in arguments.seeds for case in arguments.cases]
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    results = {tuple(result["settings"]): result for result in map(json.loads, lines)}
    data = Data(arguments.recipe, common)
    shown = []
    for case, rate, seed in wanted:
        settings = (*common, *CASES[case], f"training.learning_rate={rate}", f"training.seed={seed}")
        if settings not in results:
            result = {"case": case, "rate": rate, "seed": seed, **train(arguments.recipe, settings, data)}
            results[settings] = {**result, "settings": settings}
            with arguments.out.open("a") as file:
                file.write(json.dumps(results[settings]) + "\n")
        shown.append(results[settings])
    print(report(shown, arguments.rates[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
