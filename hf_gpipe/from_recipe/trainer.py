"""The trainer of a recipe, and its arguments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_gpipe.data.splits import Corpus
from hf_gpipe.from_recipe.tasks import Task, task_of
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.trainer import PipelineTrainer


class Prepared(NamedTuple):
    """Everything that the reader makes before the model."""

    corpus: Corpus[Any]
    tokenizer: Any
    config: PreTrainedConfig


def arguments_of(recipe: Recipe) -> PipelineTrainingArguments:
    """The trainer's arguments, for a `Pipeline` that the recipe has made: its own settings need not be repeated."""
    training, pipeline = recipe.training, recipe.pipeline
    task, sorts_rows = task_of(recipe), training.sorts_rows(recipe.data.kind)
    made_as, given = task.arguments, vars(training) | task.options(recipe)
    values = {name: value for name, value in given.items() if name in made_as.__dataclass_fields__}
    if task.section is not None:
        values |= {"max_length": recipe.data.max_length}
    if training.lr_scheduler_type == "warmup_stable_decay":
        values |= {"lr_scheduler_kwargs": {"num_decay_steps": training.decay_steps}}
    others = {
        "max_steps": training.max_steps or -1,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        # A stream draws its pairs by temperature itself.
        "sampling_temperature": 1.0 if recipe.data.streaming else recipe.data.temperature,
        "train_sampling_strategy": "group_by_length" if sorts_rows else made_as.train_sampling_strategy,
        "logging_first_step": True,
        "eval_strategy": "steps" if training.eval_steps else "no",
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 500,
        "include_for_metrics": ["loss"],
        "report_to": training.report_to or "none",
        "disable_tqdm": False,
        "use_cpu": pipeline.device == "cpu",
        "ddp_timeout": math.ceil(pipeline.timeout_seconds),
        "enable_jit_checkpoint": True,
        "remove_unused_columns": False,
    }
    return made_as(**values | others)


def trainer_of(recipe: Recipe, task: Task, pipe: Pipeline, prepared: Prepared | None) -> PipelineTrainer:
    """The trainer of a recipe, with its datasets. Every process calls it."""
    given: dict[str, Any] = {"args": arguments_of(recipe), **task.given(recipe)}

    def tokenize() -> int | None:
        """Make the datasets in the main process; the number of characters of the validation's references, if any."""
        assert prepared is not None, "the main process has prepared the data"
        corpus = prepared.corpus
        splits = {"train_dataset": corpus.train}
        if recipe.training.eval_steps:
            splits["eval_dataset"] = corpus.validation
        rows = {name: task.rows(recipe, split, prepared.tokenizer) for name, split in splits.items()}
        given.update(rows)
        counts = getattr(rows.get("eval_dataset"), "num_characters", None)
        return None if counts is None else sum(counts)

    # The process of the last stage computes the metric.
    characters = pipe.world.from_main(tokenize, takes_long=True)
    if characters is not None:
        given |= task.given_characters(characters)
    if prepared is not None:
        given["processing_class"] = prepared.tokenizer
        if (collator := task.collator(prepared.tokenizer, pipe)) is not None:
            given["data_collator"] = collator
    trainer: PipelineTrainer = task.trainer(pipe, **given)
    return trainer
