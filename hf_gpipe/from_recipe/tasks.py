"""A training task as a recipe sees it: its corpus, rows, loss, model, trainer and evaluation.

A module of `hf_gpipe.tasks` has a `Task` under the name TASK; `data.kind` decides which (`hf_gpipe.registry`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

from transformers import PreTrainedConfig

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.rows import Read, corpus_of_rows
from hf_gpipe.data.splits import Corpus
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, evaluate_loss
from hf_gpipe.from_recipe.processors import tokenizer_of
from hf_gpipe.from_recipe.workload import longest_mini_batch
from hf_gpipe.losses.loss import Loss, TokenLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.recipe import DataSection, Recipe
from hf_gpipe.registry import task_module, task_of_kind
from hf_gpipe.settings.section import Settings
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.trainer import PipelineTrainer

Report = Any
"""The result of an evaluation, the same in every process, with the methods of a `HeldOutReport`."""


class Task:
    """A training task, as a recipe sees it. A subclass overrides what is different.

    Attributes:
        items: what a corpus consists of, in messages.
        rows_in_words: the same in the line before the training; empty: as `items`.
        evaluating: the evaluation at the end, in words, which go on with the name of the split.
        head: "lm": the model's own head; "classes": a head for `data.labels`; "score": one number; "images": a head
            for the labels of images; "none": hidden states.
        trainer: its class. One with `examples` reads rows by the method `read` of that class, makes the examples,
            collates them, and has a loss of its own.
    """

    items = "rows"
    rows_in_words = ""
    evaluating = "evaluating the rows"
    head: Literal["lm", "classes", "score", "images", "none"] = "lm"
    trainer: Any = PipelineTrainer

    def given(self, recipe: Recipe) -> Mapping[str, Any]:
        """Arguments of the trainer beside the pipeline, its own arguments and the data."""
        return {}

    def given_characters(self, characters: int) -> Mapping[str, Any]:
        """Arguments of the trainer where the rows to evaluate on have so many characters in all."""
        return {}

    # ------------------------------------------------------------------ data

    def corpus(self, recipe: Recipe) -> Any:
        """The corpus that the recipe names, with something to evaluate on. Raises DataError."""
        corpus = self.read(recipe)
        for split in ("test", "validation"):
            if split in evaluated(recipe) and not getattr(corpus, split):
                raise DataError(
                    f"the corpus has no {split} {self.items} to evaluate on; raise data.{split}_fraction, or ask for "
                    "more examples"
                )
        return corpus

    def read(self, recipe: Recipe) -> Any:
        """The corpus that the recipe names, in three splits. Raises DataError."""
        return corpus_of_rows(recipe.data, self.reader(recipe), self.items, evaluated(recipe))

    def reader(self, recipe: Recipe) -> Read:
        """The function that reads a row."""
        return self.trainer.examples.read

    def size(self, data: DataSection, corpus: Any) -> str:
        """How much there is of a corpus, in words."""
        words = self.rows_in_words or self.items
        return f"{len(corpus.train)} training {words} of up to {data.max_length} tokens"

    def processor(self, recipe: Recipe, corpus: Corpus[Any], checkpoint: Any = None) -> Any:
        """The tokenizer, or what prepares rows in its place; `checkpoint` is what a run resumes from."""
        return tokenizer_of(recipe, corpus, checkpoint)

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> Any:
        """A dataset of rows to collate, perhaps with `num_characters` of each, which `given_characters` gets."""
        return self.trainer.examples(split, processor, max_length=recipe.data.max_length)

    def collator(self, processor: Any, pipe: Pipeline) -> Collate | None:
        """Rows to a mini-batch; None: the trainer has one."""
        return None if hasattr(self.trainer, "examples") else PairCollator.for_tokenizer(processor)

    # ------------------------------------------------------------------ model and loss

    @property
    def arguments(self) -> type[PipelineTrainingArguments]:
        """The class of the trainer's arguments."""
        return self.trainer._arguments

    @property
    def section(self) -> type[Settings] | None:
        """The section of a recipe that has the options of its loss; None: it has no loss of its own."""
        return getattr(self.arguments, "section", None)

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """The values of that section."""
        return next((vars(own) for own in vars(recipe).values() if type(own) is self.section), {})

    def loss(self, recipe: Recipe) -> Loss:
        """The loss of training."""
        if (own := getattr(self.arguments, "_loss", None)) is not None:
            return own.of(SimpleNamespace(**self.options(recipe)))
        if recipe.companion is not None:
            return task_module(recipe.companion[1].task).loss_of(recipe)
        return TokenLoss.from_settings(recipe.training)

    def workload(self, recipe: Recipe, config: PreTrainedConfig) -> Workload:
        """The shape of the recipe's longest mini-batch, for a model of this configuration."""
        rows = getattr(self.loss(recipe), "rows_per_unit", 1)
        is_encoder_decoder = bool(config.is_encoder_decoder)
        return longest_mini_batch(recipe, is_encoder_decoder=is_encoder_decoder, rows_of_example=rows)

    def planned(self, recipe: Recipe, inputs: PlanInputs) -> PlanInputs:
        """The inputs of the planner, with what a step does beside forwards and backwards."""
        return inputs

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, recipe: Recipe, pipe: Pipeline, processor: Any, corpus: Corpus[Any] | None) -> Report:
        """The report on the split that the recipe evaluates on; other processes have no processor and no corpus."""
        held_out = HeldOut(
            lambda: self.rows(recipe, getattr(corpus, recipe.evaluation.split), processor),
            recipe.evaluation.batch_size,
            recipe.evaluation.max_examples,
        )
        return self.measure(recipe, pipe, held_out, processor)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        """The report on held-out rows: the loss, with the metrics that it notes."""
        padding = getattr(pipe.adapter.config.get_text_config(), "pad_token_id", None) or 0
        return evaluate_loss(pipe, held_out, self.trainer.examples.collator(padding), recipe.data.kind, self.items)


def task_of(recipe: Recipe) -> Task:
    """The task that the kind of a recipe's data decides. Raises UserError where a module of that name has none."""
    task: Task = task_of_kind(recipe.data.kind)
    return task


def evaluated(recipe: Recipe) -> set[str]:
    """The splits that the recipe evaluates on."""
    return {recipe.evaluation.split, *(["validation"] if recipe.training.eval_steps else [])}
