"""`OwnLossTrainer`: a trainer whose loss is another one than the cross-entropy, and notes metrics.

A pair of answers is two neighbouring rows of a micro-batch, and an example of KTO is one row. Stages, tables and the
training loop are those of any other training.
"""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.adapters.classifiers import change
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.examples.embeddings import EmbeddingExamples
from hf_gpipe.data.examples.preferences import PreferenceExamples
from hf_gpipe.data.examples.prompts import PromptExamples
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import TrainingSection
from hf_gpipe.settings.losses import PreferencesSection
from hf_gpipe.settings.section import check_by, keys_of
from hf_gpipe.trainers.examples import ExamplesTrainer
from hf_gpipe.trainers.model_arguments import ModelArguments
from hf_gpipe.training.arguments import PipelineTrainingArguments, argument, key_of
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.pools import has_index


@dataclass
class OwnLossArguments(PipelineTrainingArguments):
    """Arguments of a trainer with a loss of its own, TRL's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    logging_steps: float = argument(10, "Updates between two lines of metrics.")
    max_length: int | None = argument(1024, "Tokens of a prompt with its answer at most; None: any number.")
    disable_dropout: bool = key_of(PreferencesSection, "disable_dropout")
    #: The class of the loss.
    _loss: ClassVar[type[NotingLoss]]

    def check(self) -> None:
        super().check()
        for name, key in keys_of(TrainingSection).items():
            if not key.is_used_by("preferences") and (value := getattr(self, name)) not in (None, key.default):
                raise UserError(
                    f"{name}={value!r}: mini-batches are made of whole examples, and the loss is not the "
                    "cross-entropy; leave it out"
                )
        assert self._loss.section is not None
        check_by(self._loss.section, self)
        self.make_loss()

    def make_loss(self) -> Any:
        """The loss that these arguments ask for, a `NotingLoss`."""
        return self._loss.of(self)

    @property
    def of_example(self) -> tuple[int, int]:
        """The rows that an example becomes, and the most tokens that are generated after its own."""
        return self.make_loss().rows_per_unit, 0


class OwnLossTrainer(ExamplesTrainer, ABC):
    """A trainer with a loss of its own; its subclasses explain the arguments.

    A subclass names the class of its arguments, which names the loss, and that of its examples; `_collator` makes
    mini-batches of them.
    """

    args: OwnLossArguments
    _arguments: ClassVar[type[OwnLossArguments]]
    #: The class of its examples.
    _class_of_examples: ClassVar[type[PreferenceExamples] | type[EmbeddingExamples] | type[PromptExamples]]
    #: The columns that rows may have besides, of a reference's log-probabilities that are computed once.
    _of_reference: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: Pipeline | ModelSource,
        args: Any = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        self._collated_columns = (*self._class_of_examples.columns, *self._of_reference)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        return model, self.args.model_options(model) if isinstance(self.args, ModelArguments) else {}

    def _example(self, spec: ModelSpec) -> Workload | None:
        if self.train_dataset is None or not hasattr(self.train_dataset, "lengths"):
            return None
        num_rows, num_tokens = self.args.of_example
        longest = max(self.train_dataset.lengths) + num_tokens
        return Workload(num_rows * self.args.per_device_train_batch_size, longest, longest)

    @property
    def _padding(self) -> int:
        """A token that fills shorter rows; without a tokenizer any, for masks leave it out."""
        return 0 if self._tokenizer is None else PairCollator.for_tokenizer(self._tokenizer).pad_token_id

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        if self.pipe.loss != (asked := self.args.make_loss()):
            raise UserError(
                f"the given Pipeline has the loss {self.pipe.loss}, and the arguments ask for {asked}; make it with "
                "loss=args.make_loss(), or give the model"
            )
        if self.args.disable_dropout:
            for stage in self.pipe.weights.every_model:
                for module in stage.model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0

    def _examples(self, dataset: Any, *, is_training: bool = False) -> Any:
        if dataset is None:
            return None
        if not has_index(dataset):
            raise DataError("this trainer needs a map-style dataset; take a part of the stream, by list(...) say")
        kind = self._class_of_examples
        if isinstance(dataset, kind):
            return dataset
        # Rows of ids may come from elsewhere, except for those of prompts: their texts are needed.
        known_by, of_preferences = kind.columns[0], PreferenceExamples.columns[0]
        if not issubclass(kind, PromptExamples) and len(dataset) and known_by in (row := dataset[0]):
            if known_by != of_preferences and of_preferences in row:
                raise DataError(
                    f"the dataset has the column {of_preferences!r}: its answers are without their prompts; give the "
                    f"rows of text, or a dataset of {kind.__name__}"
                )
            return dataset
        if self._tokenizer is None:
            raise UserError(f"processing_class is None; give the tokenizer, or a dataset of {kind.__name__}")
        return kind(dataset, self._tokenizer, max_length=self.args.max_length)

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """The means over the units since the last call, of all processes. Every process calls it."""
        loss = self.pipe.loss
        assert isinstance(loss, NotingLoss)
        sums, counts = self.world.all_reduce(loss.take(is_training=is_training)).tolist()
        metrics = zip(loss.metrics, sums, counts, strict=True)
        return {name: value / count for name, value, count in metrics if count}


def as_class(
    model: ModelSource,
    fields_of: Callable[[PreTrainedConfig, bool], dict[str, Any]],
    *,
    trust_remote_code: bool = False,
) -> tuple[ModelSource, dict[str, Any]]:
    """A model as one of another class, and more options of `ModelSpec` for it; a model in memory stays as it is.

    Args:
        model: the model.
        fields_of: a configuration, and whether it is a saved model's -> its fields that make it one of that class.
        trust_remote_code: whether code beside a saved model's configuration may be run.
    """
    if isinstance(model, nn.Module):
        return model, {}
    if isinstance(model, PreTrainedConfig):
        config = copy.deepcopy(model)
        change(config, fields_of(config, False))
        return config, {}
    source = base_of(model) if has_adapters(model) else model
    fields = fields_of(read_config(source, trust_remote_code=trust_remote_code), True)
    return model, {"config_overrides": fields} if fields else {}
