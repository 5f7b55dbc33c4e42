"""Trains the model of a run by plain transformers, and compares the validation losses with the run's own.

    python scripts/reference_trainer.py outputs/scaling/l10n-base/seed-1 [--steps 600] [--tolerance 0.01]

The folder is that of a finished or interrupted run of `hf-gpipe train`, or of scripts/scaling.py, on pairs.
`Seq2SeqTrainer` gets the same first weights, the same mini-batches in the same order, and the same learning rates, the
final decay's too. At each evaluation of the run the plain model's validation loss per character is printed beside it.
The two round differently, and while a model learns fastest that can set one of them back by some updates.

Exit code: 0 the best losses until the last of these updates differ by at most the tolerance, 1 they do not, 2 an error
that you can correct.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.report import table
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from translation_scaling.curves import newest_checkpoint, read_curve, state_of

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.commands.base import Parser, run_command
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.checks import loss_of
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.from_recipe.tasks import task_of
from hf_gpipe.from_recipe.trainer import arguments_of
from hf_gpipe.recipe import Recipe, load_recipe

Batch = Mapping[str, torch.Tensor]
#: Of the run's arguments, those that decide an update.
SHARED_ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("weight_decay", "max_grad_norm", "lr_scheduler_kwargs"),
)


class Batches(torch.utils.data.IterableDataset[Batch]):
    """The mini-batches of a run, epoch after epoch."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._batches = trainer.train_batches()

    def __iter__(self) -> Iterator[Batch]:
        assert self._batches is not None, "this process reads the data"
        return itertools.chain.from_iterable(map(self._batches.epoch, itertools.count()))


class Validation(TrainerCallback):
    """Computes the validation loss per character after some of the updates, the last of which ends the training."""

    def __init__(self, batches: Sequence[Batch], characters: int, steps: Sequence[int]) -> None:
        self._batches, self._characters, self._steps = batches, characters, set(steps)
        self.losses: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: PreTrainedModel, **kwargs: Any) -> None:
        """Evaluate, if this update is one of those."""
        if state.global_step not in self._steps:
            return
        model.eval()
        with torch.no_grad():
            nll = sum(float(model(**batch).loss) * int((batch["labels"] != -100).sum()) for batch in self._batches)
        model.train()
        self.losses[state.global_step] = nll / self._characters
        control.should_training_stop = state.global_step == max(self._steps)


def dropouts(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The probabilities of dropout and of dropped layers in the configuration of a run's model, but for 0."""
    config = model_config(recipe, AutoTokenizer.from_pretrained(newest_checkpoint(folder) or folder)).to_dict()
    return {name: value for name, value in config.items() if "drop" in name and value}


def updates_of(recipe: Recipe, folder: Path) -> int:
    """The updates that the training in a folder was to have."""
    if recipe.training.max_steps is not None:
        return recipe.training.max_steps
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint, which would tell the number of updates; set training.max_steps")
    return int(state_of(checkpoint)["max_steps"])


def losses_of_plain_trainer(recipe: Recipe, folder: Path, steps: Sequence[int]) -> dict[int, float]:
    """Train by `Seq2SeqTrainer` up to the last of `steps`; the validation loss per character after each."""
    max_steps = updates_of(recipe, folder)
    tokenizer = AutoTokenizer.from_pretrained(newest_checkpoint(folder) or folder)
    task = task_of(recipe)
    corpus = task.corpus(recipe)
    train, validation = (task.rows(recipe, split, tokenizer) for split in (corpus.train, corpus.validation))
    collator = PairCollator.for_tokenizer(tokenizer)
    pipe = Pipeline(
        model_config(recipe, tokenizer),
        1,
        seed=recipe.training.seed,
        loss=loss_of(recipe),
        device="cpu",
        length_bucketing=recipe.training.length_bucketing,
    )
    own = PipelineTrainer(pipe, arguments_of(recipe), collator, processing_class=tokenizer, train_dataset=train)
    rows, size = [validation[place] for place in range(len(validation))], recipe.evaluation.batch_size
    batches = [collator(rows[start : start + size]) for start in range(0, len(rows), size)]
    watch = Validation(batches, sum(validation.num_characters), steps)
    with tempfile.TemporaryDirectory() as temporary:
        pipe.save_pretrained(temporary)
        args = Seq2SeqTrainingArguments(
            output_dir=temporary,
            max_steps=max_steps,
            per_device_train_batch_size=1,  # a mini-batch
            **{name: getattr(own.args, name) for name in SHARED_ARGUMENTS},
            **{"remove_unused_columns": False, "save_strategy": "no", "logging_steps": 100, "report_to": "none"},
            **{"disable_tqdm": True, "use_cpu": True},
        )
        plain = Seq2SeqTrainer(
            AutoModelForSeq2SeqLM.from_pretrained(temporary),
            args,
            data_collator=lambda batches: dict(batches[0]),
            train_dataset=Batches(own),
            callbacks=[watch],
        )
        plain.train()
    return watch.losses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, help="of the run")
    parser.add_argument("--steps", type=int, help="updates to compare; default: all")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative; default: 0.01")

    def work() -> int:
        options = parser.parse_args(argv)
        if not (options.folder / "metrics.jsonl").exists():
            raise UserError(f"{options.folder} has no run: metrics.jsonl is missing")
        recipe = load_recipe(options.folder / "recipe.yaml")
        training = recipe.training
        wrong = dropouts(recipe, options.folder)
        if training.lr_scheduler_type != "warmup_stable_decay":
            wrong["training.lr_scheduler_type"] = training.lr_scheduler_type
        if wrong:
            raise UserError(
                f"{options.folder} has {', '.join(f'{name} = {value}' for name, value in wrong.items())}; only a run "
                "with warmup_stable_decay and without dropout can be compared: the learning rate of others depends on "
                "the last update, and dropout is not transformers' own"
            )
        ours = {point.step: point.loss for point in read_curve(options.folder).points}
        steps = [step for step in ours if options.steps is None or step <= options.steps]
        if not steps:
            raise UserError(f"{options.folder} has no evaluation in its first {options.steps} updates")
        plain = losses_of_plain_trainer(recipe, options.folder, steps)
        rows = [[str(step), f"{ours[step]:.4f}", f"{plain[step]:.4f}"] for step in steps]
        print(table(["update", "this run", "Seq2SeqTrainer"], rows))
        ratio = min(ours[step] for step in steps) / min(plain.values())
        print(f"the best of this run is {ratio:.4f} times Seq2SeqTrainer's")
        return int(abs(ratio - 1) > options.tolerance)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
