"""The trainer of a recipe, and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from hf_gpipe.data.examples.teacher_file import TeacherCollator, TeacherFile, WithTeacher
from hf_gpipe.data.splits import Corpus
from hf_gpipe.from_recipe.checks import sorts_rows
from hf_gpipe.from_recipe.evaluate_translation import PerCharacter, without_logits
from hf_gpipe.from_recipe.held_out import accuracy
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.trainers.checkable import checked_by
from hf_gpipe.trainers.dpo import PipelineDPOConfig, PipelineDPOTrainer
from hf_gpipe.trainers.embeddings import PipelineEmbeddingConfig, PipelineEmbeddingTrainer
from hf_gpipe.trainers.grpo import PipelineGRPOConfig, PipelineGRPOTrainer
from hf_gpipe.trainers.kto import PipelineKTOConfig, PipelineKTOTrainer
from hf_gpipe.trainers.pairs import PairArguments
from hf_gpipe.trainers.reward import PipelineRewardConfig, PipelineRewardTrainer
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.trainer import PipelineTrainer


class _Own(NamedTuple):
    """The trainer of a kind of data that has one of its own.

    Attributes:
        arguments: their class.
        trainer: its class.
        of_recipe: what it is given of a recipe beside the pipeline.
    """

    arguments: type[PairArguments]
    trainer: Callable[..., PipelineTrainer]
    of_recipe: Callable[[Recipe], tuple[Any, ...]] = lambda recipe: ()


_TRAINERS = {
    "preferences": _Own(PipelineDPOConfig, PipelineDPOTrainer),
    "kto": _Own(PipelineKTOConfig, PipelineKTOTrainer),
    "rewards": _Own(PipelineRewardConfig, PipelineRewardTrainer),
    "embeddings": _Own(PipelineEmbeddingConfig, PipelineEmbeddingTrainer),
    "prompts": _Own(PipelineGRPOConfig, PipelineGRPOTrainer, lambda recipe: (checked_by(recipe.grpo.reward),)),
}


class Prepared(NamedTuple):
    """Everything that the reader makes before the model."""

    corpus: Corpus[Any]
    tokenizer: Any
    config: PreTrainedConfig


def arguments_of(recipe: Recipe) -> PipelineTrainingArguments:
    """The trainer's arguments, for a `Pipeline` that the recipe has made: its own settings need not be repeated."""
    training, pipeline = recipe.training, recipe.pipeline
    own = _TRAINERS.get(recipe.data.kind)
    made_as = PipelineTrainingArguments if own is None else own.arguments
    values = {name: value for name, value in vars(training).items() if name in made_as.__dataclass_fields__}
    if own is not None:
        of_loss = {name: value for name, value in vars(recipe.of_loss).items() if name != "reward"}
        values |= {**of_loss, "max_length": recipe.data.max_length}
    order = "group_by_length" if sorts_rows(recipe) else "random"
    if recipe.data.kind == "kto":  # so that each mini-batch is that of the reference's pass
        order = "sequential"
    if training.lr_scheduler_type == "warmup_stable_decay":
        values |= {"lr_scheduler_kwargs": {"num_decay_steps": training.decay_steps}}
    others = {
        "max_steps": training.max_steps or -1,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        # A stream draws its pairs by temperature itself.
        "sampling_temperature": 1.0 if recipe.data.streaming else recipe.data.temperature,
        "train_sampling_strategy": order,
        "logging_first_step": True,
        "eval_strategy": "steps" if training.eval_steps else "no",
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 500,
        "include_for_metrics": ["loss"],
        "report_to": training.report_to or "none",
        "disable_tqdm": False,
        "use_cpu": pipeline.device == "cpu",
        "ddp_timeout": int(pipeline.timeout_seconds),
        "enable_jit_checkpoint": True,
        "remove_unused_columns": False,
    }
    return made_as(**values | others)


def trainer_of(recipe: Recipe, task: Task, pipe: Pipeline, prepared: Prepared | None) -> PipelineTrainer:
    """The trainer of a recipe, with its datasets. Every process calls it."""
    args = arguments_of(recipe)
    decoder_only = not pipe.adapter.config.is_encoder_decoder

    datasets: dict[str, Any] = {}

    def tokenize() -> int | None:
        """Make the datasets in the reader; the number of characters of the validation's references, if any."""
        assert prepared is not None, "the reader has prepared the data"
        corpus, tokenizer = prepared.corpus, prepared.tokenizer
        file = teacher_file(recipe, pipe)

        def rows(split: Any) -> Any:
            tokenized = task.rows(recipe.data, split, tokenizer, decoder_only=decoder_only)
            return tokenized if file is None else WithTeacher(tokenized, file)

        datasets["train_dataset"] = rows(corpus.train)
        if not recipe.training.eval_steps:
            return None
        datasets["eval_dataset"] = rows(corpus.validation)
        if task.num_characters is None:
            return None
        return task.num_characters(recipe.data, corpus.validation, tokenizer, decoder_only=decoder_only)

    # The process of the last stage computes the metric.
    characters = pipe.world.from_reader(tokenize, takes_long=True)
    metrics: dict[str, Any] = {}
    if characters is not None:
        metrics = {"compute_metrics": PerCharacter(characters), "preprocess_logits_for_metrics": without_logits}
    if (own := _TRAINERS.get(recipe.data.kind)) is not None:
        tokenizer = None if prepared is None else prepared.tokenizer
        return own.trainer(pipe, *own.of_recipe(recipe), args=args, processing_class=tokenizer, **datasets)
    if pipe.adapter.is_classifier:
        metrics = {"compute_metrics": accuracy}
    if prepared is None:
        return PipelineTrainer(pipe, args, **metrics)
    tokenizer = prepared.tokenizer
    collator = task.collator(tokenizer, pipe)
    if recipe.distillation.top_k_file is not None:
        collator = TeacherCollator(collator)
    return PipelineTrainer(pipe, args, collator, processing_class=tokenizer, **datasets, **metrics)


def teacher_file(recipe: Recipe, pipe: Pipeline) -> TeacherFile | None:
    """The file in place of a teacher, checked; None: there is none. Raises DataError."""
    given = recipe.distillation
    if given.top_k_file is None:
        return None
    vocabulary = pipe.adapter.reference.get_output_embeddings().weight.shape[0]
    return TeacherFile(given.top_k_file, vocabulary=vocabulary, temperature=given.temperature)
