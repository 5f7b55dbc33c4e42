"""`PairTrainer`: what the trainers of preferences share.

A pair of answers is two neighbouring rows of a micro-batch, and an example of KTO is one row. Stages, tables and the
training loop are those of any other training.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.adapters.classifiers import change
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.embeddings import EmbeddingExamples
from hf_gpipe.data.preferences import PreferenceExamples
from hf_gpipe.data.prompts import PromptExamples
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import PreferencesSection
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.training.arguments import PipelineTrainingArguments, argument, key_of
from hf_gpipe.training.base import join_with, pipeline_of
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.preference_loss import NotingLoss
from hf_gpipe.training.trainer import PipelineTrainer


@dataclass
class PairArguments(PipelineTrainingArguments, ABC):
    """Arguments of a trainer of preferences, TRL's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    logging_steps: float = argument(10, "Updates between two lines of metrics.")
    max_length: int | None = argument(1024, "Tokens of a prompt with its answer at most; None: any number.")
    disable_dropout: bool = key_of(PreferencesSection, "disable_dropout")

    def check(self) -> None:
        """Raise UserError for a value that a pipeline does not support."""
        super().check()
        if self.batch_tokens is not None or self.packing:
            name = "packing" if self.packing else "batch_tokens"
            raise UserError(f"{name}={getattr(self, name)!r}: mini-batches are made of whole examples; leave it out")
        if self.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} is of the cross-entropy"
                f"{'; use label_smoothing' if hasattr(self, 'label_smoothing') else ', and the loss is another one'}"
            )
        self.make_loss()

    @abstractmethod
    def make_loss(self) -> NotingLoss:
        """The loss that these arguments ask for."""

    @property
    def rows_per_example(self) -> int:
        """Rows of a mini-batch that an example becomes."""
        return self.make_loss().rows_per_unit

    @property
    def generated_tokens(self) -> int:
        """The most tokens that are generated after those of an example."""
        return 0


class PairTrainer(PipelineTrainer, ABC):
    """A trainer whose loss is of pairs; its subclasses explain the arguments."""

    args: PairArguments
    #: The class of its arguments, and that of its examples.
    _arguments: ClassVar[type[PairArguments]]
    _class_of_examples: ClassVar[type[PreferenceExamples] | type[EmbeddingExamples] | type[PromptExamples]]

    def __init__(
        self,
        model: Pipeline | ModelSource,
        args: Any = None,
        data_collator: Callable[[list[Any]], Batch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = args if args is not None else self._arguments()
        name = type(self).__name__
        if not isinstance(args, self._arguments):
            raise UserError(f"args is a {type(args).__name__}; {name} needs a {self._arguments.__name__}")
        args.check()
        join_with(args)
        if processing_class is None and isinstance(model, str):
            processing_class = read_tokenizer(model)
        self._tokenizer, self._max_length = processing_class, args.max_length
        world = model.world if isinstance(model, Pipeline) else world_for(args.config)
        datasets: dict[str, Any] = {}

        def prepare() -> None:
            datasets["train"] = self._examples(train_dataset)
            datasets["eval"] = each(eval_dataset, self._examples)
            if data_collator is None and processing_class is None:
                raise UserError("processing_class is None; give the tokenizer, whose padding token fills shorter rows")

        world.from_reader(prepare, takes_long=True)
        options = {"quantization_config": quantization_config, "peft_config": peft_config}
        if not isinstance(model, Pipeline):
            model, others = self._as_source(model)
            options |= {"loss": args.make_loss(), **others}
        pipe = pipeline_of(model, args, lambda: self._workload(datasets.get("train"), args), world=world, **options)
        if pipe.loss != (asked := args.make_loss()):
            raise UserError(
                f"the given Pipeline has the loss {pipe.loss}, and the arguments ask for {asked}; make it with "
                "loss=args.make_loss(), or give the model"
            )
        assert isinstance(pipe.loss, NotingLoss)
        self._loss_of_pairs = pipe.loss
        if pipe.adapter.config.is_encoder_decoder:
            raise UserError(f"{pipe.adapter.config.model_type} is an encoder-decoder; give a decoder-only model")
        self._check_pipeline(pipe)
        if args.disable_dropout:
            for stage in pipe.weights.every_model:
                for module in stage.model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0
        super().__init__(
            pipe,
            args,
            data_collator or self._collator(pipe),
            datasets.get("train"),
            datasets.get("eval"),
            processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def _workload(self, dataset: Any, args: Any) -> Workload | None:
        """The shape of the longest mini-batch to come, for the planner."""
        if dataset is None or not hasattr(dataset, "lengths"):
            return None
        longest = max(dataset.lengths) + args.generated_tokens
        return Workload(args.rows_per_example * args.per_device_train_batch_size, longest, longest)

    @property
    def _padding(self) -> int:
        """A token that fills shorter rows; without a tokenizer any, for masks leave it out."""
        return 0 if self._tokenizer is None else PairCollator.for_tokenizer(self._tokenizer).pad_token_id

    def _as_source(self, model: ModelSource) -> tuple[ModelSource, dict[str, Any]]:
        """The model to make a Pipeline of, and more options of `ModelSpec` for it."""
        return model, {}

    def _check_pipeline(self, pipe: Pipeline) -> None:
        """Raise UserError where a model cannot be trained on pairs."""

    @abstractmethod
    def _collator(self, pipe: Pipeline) -> Callable[[list[Any]], Batch]:
        """Makes mini-batches, where none was given."""

    def _examples(self, dataset: Any) -> Any:
        """The examples of a dataset, which are known by their columns; None for None."""
        if dataset is None:
            return None
        if not has_index(dataset):
            raise DataError("this trainer needs a map-style dataset; take a part of the stream, by list(...) say")
        kind = self._class_of_examples
        if isinstance(dataset, kind):
            return dataset
        # Rows of ids may come from elsewhere, except for those of prompts: their texts are needed.
        if not issubclass(kind, PromptExamples) and len(dataset) and kind.known_by in (row := dataset[0]):
            of_preferences = PreferenceExamples.known_by
            if kind.known_by != of_preferences and of_preferences in row:
                raise DataError(
                    f"the dataset has the column {of_preferences!r}: its answers are without their prompts; give the "
                    f"rows of text, or a dataset of {kind.__name__}"
                )
            return dataset
        if self._tokenizer is None:
            raise UserError(f"processing_class is None; give the tokenizer, or a dataset of {kind.__name__}")
        return kind(dataset, self._tokenizer, max_length=self._max_length)

    def _completed(self, dataset: Any) -> Any:
        """The examples to evaluate on with all that the loss reads; every process calls it."""
        return dataset

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        examples: list[Any] = []
        self.world.from_reader(lambda: examples.append(self._examples(dataset)), takes_long=True)
        return super()._evaluated(self._completed(examples[0] if examples else None), generation, required)

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """The means over the units since the last call, of all processes. Every process calls it."""
        sums, counts = self.world.all_reduce(self._loss_of_pairs.take(is_training=is_training)).tolist()
        metrics = zip(self._loss_of_pairs.metrics, sums, counts, strict=True)
        return {name: value / count for name, value, count in metrics if count}


def as_class(
    model: ModelSource, fields_of: Callable[[PreTrainedConfig, bool], dict[str, Any]]
) -> tuple[ModelSource, dict[str, Any]]:
    """A model as one of another class, and more options of `ModelSpec` for it; a model in memory stays as it is.

    Args:
        model: the model.
        fields_of: a configuration, and whether it is a saved model's -> its fields that make it one of that class.
    """
    if isinstance(model, nn.Module):
        return model, {}
    if isinstance(model, PreTrainedConfig):
        config = copy.deepcopy(model)
        change(config, fields_of(config, False))
        return config, {}
    fields = fields_of(read_config(base_of(model) if has_adapters(model) else model), True)
    return model, {"config_overrides": fields} if fields else {}


def each(datasets: Any, function: Callable[[Any], Any]) -> Any:
    """The result of a function for a dataset, or for each of a dict of several."""
    if isinstance(datasets, Mapping):
        return {name: function(dataset) for name, dataset in datasets.items()}
    return function(datasets)
