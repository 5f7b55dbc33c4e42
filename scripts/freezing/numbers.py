"""Losses, gradient norms, weights, likelihoods and tokens of small runs, one for each mode, loss and kind of model."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import torch

from scripts.freezing.checkpoints import Training, tolerance_of_training, train
from scripts.freezing.results import IN_FLOAT32, IN_FLOAT64, IN_HALF, Entries, Tolerance
from scripts.freezing.runs import RUNS, text_of
from tests.gloo import run_gloo

FILE = "numbers.txt"
#: Whole trainings, beside the steps of `RUNS`.
TRAININGS: dict[str, Training] = {
    "trainer": Training("marian", {"schedule": "gpipe"}, config={"dropout": 0.1, "tied": True}),
    "trainer by tokens": Training(arguments={"batch_tokens": 30, "train_sampling_strategy": "group_by_length"}),
    "trainer clipped": Training(arguments={"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}),
    "trainer zero": Training(arguments={"replicas": 2, "zero": 1, "optim": "adamw_torch_fused"}, processes=4),
    "trainer master weights": Training(arguments={"fp32_master_weights": True}, dtype=torch.bfloat16),
    "trainer bf16": Training(arguments={"bf16": True}, dtype=torch.float32),
    "trainer fp16": Training(arguments={"fp16": True}, dtype=torch.float32),
    "trainer smoothed": Training(arguments={"label_smoothing_factor": 0.1, "logit_clipping": 3.0}),
    "trainer noise": Training(arguments={"neftune_noise_alpha": 5.0}),
    "trainer packing": Training(arguments={"packing": True}),
    "trainer adafactor": Training("t5", {"optim": "adafactor"}, config={"tied": True}),
    "trainer evaluates": Training("bart", {"eval_strategy": "steps", "eval_steps": 4}, config={"tied": True}),
    "trainer updates beside": Training(
        arguments={
            **{"num_stages": 4, "schedule": "round_robin", "offload_weights": "all"},
            **{"recompute": "stage", "max_grad_norm": 0.0},
        },
        processes=2,
    ),
    "trainer asynchronous": Training(arguments={"schedule": "pipedream_2bw"}, processes=2),
    "trainer dpo": Training(kind="dpo", adapters=True),
    "trainer grpo": Training(kind="grpo"),
}
#: The quickstart from the command line, on less data and with dropout, in two processes.
RECIPE = (
    *("model.config.dropout=0.1", "model.config.attention_dropout=0.1", "model.config.activation_dropout=0.1"),
    *("data.languages=[de,fr]", "data.examples_per_language=100", "data.max_number=99", "tokenizer.vocab_size=400"),
    *("training.logging_steps=1", "training.eval_steps=null", "training.save_steps=null", "training.max_steps=10"),
    *("evaluation.max_examples=1", "model.attn_implementation=eager", "pipeline.num_stages=2"),
)
_ROOT = Path(__file__).resolve().parents[2]


def names() -> list[str]:
    """The names of all runs, in an order in which those of several processes are among the others."""
    return sorted((*RUNS, *TRAININGS, "recipe"), key=lambda name: crc32(name.encode()))


def entries(wanted: Sequence[str]) -> Entries:
    """The texts of some runs."""
    return {name: _told(name) for name in wanted}


def _told(name: str) -> str:
    if name == "recipe":
        return _recipe()
    if name in TRAININGS:
        with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as folder:
            return train(TRAININGS[name], folder, {"save_strategy": "no"}, resumes=False)
    if RUNS[name].processes == 1:
        try:
            return text_of(name)
        except Exception as error:  # an error of a run is what the run does
            return f"{type(error).__name__}: {error}"
    texts = run_gloo(text_of, RUNS[name].processes, name)
    return texts[0] if len(set(texts)) == 1 else "\n".join(f"process {n}:\n{text}" for n, text in enumerate(texts))


def _recipe() -> str:
    """Loss and gradient norm of each step of the recipe. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-freeze-") as folder:
        recipe = str(_ROOT / "recipes" / "quickstart.yaml")
        command = [sys.executable, "-m", "hf_gpipe.train", recipe, *RECIPE, f"training.output_dir={folder}/out"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        lines = map(json.loads, (Path(folder) / "out" / "metrics.jsonl").read_text().splitlines())
        return "\n".join(f"loss {line['loss']!r} norm {line['grad_norm']!r}" for line in lines if "loss" in line)


def tolerance_of(name: str) -> Tolerance:
    """By the narrowest type that a run computes in; BatchNorm of two rows makes much of the order of its sums."""
    if name == "recipe" or name.startswith("images"):
        return IN_FLOAT32
    if name in TRAININGS:
        return tolerance_of_training(TRAININGS[name])
    run = RUNS[name]
    if run.dtype == torch.bfloat16 or run.options.get("autocast") or run.options.get("boundary_dtype"):
        return IN_HALF
    return IN_FLOAT32 if run.dtype == torch.float32 else IN_FLOAT64
