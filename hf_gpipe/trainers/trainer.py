"""`TaskTrainer`: what the trainers of TRL's interface share. They make examples of rows before the training."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import EvalPrediction, PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback

from hf_gpipe.adapters.classifiers import change
from hf_gpipe.adapters.routers import coefficient_of
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.data.collate import ExampleCollator, PairCollator
from hf_gpipe.data.stream import EncodedStream, encoded_stream
from hf_gpipe.data.tokenizer import has_tokenizer, read_tokenizer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.libraries.transformers import source_of
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.trainers.arguments import LanguageModelArguments, ModelArguments, TaskArguments
from hf_gpipe.training.loader import Batch, Collate, MiniBatches
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.trainer import PipelineTrainer


class TaskTrainer(PipelineTrainer):
    """A trainer of a task, which makes the examples of rows itself; its subclasses explain the arguments.

    The examples are made in the main process alone; the datasets of the others are None. Stages, tables and the
    training loop are those of any other training.

    A subclass names the class of its arguments, which names the loss, and that of its examples, which names what makes
    mini-batches of them.
    """

    args: Any
    _arguments: ClassVar[type[TaskArguments]]
    #: The class of its examples.
    examples: ClassVar[Any]
    #: The columns that rows may have besides, such as a reference's log-probabilities that are computed once.
    _other_columns: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: Pipeline | ModelSource,
        args: Any = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        self._collated_columns = (*self.examples.columns, *self._other_columns)
        options = {"callbacks": callbacks, "optimizers": optimizers, "compute_metrics": compute_metrics, **others}
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            **options,
        )

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the auxiliary loss of a mixture of experts is added."""
        return bool(getattr(self.pipe.adapter.config, "output_router_logits", False))

    @property
    def _loss(self) -> Any:
        """The loss that is asked for."""
        return self.args.make_loss()

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer, which may be that of a processor; None: there is none."""
        given = self.processing_class
        return given.tokenizer if isinstance(given, ProcessorMixin) else given

    @property
    def _padding(self) -> int:
        """A token that fills shorter rows; without a tokenizer any, for masks leave it out."""
        return 0 if self._tokenizer is None else PairCollator.for_tokenizer(self._tokenizer).pad_token_id

    # ------------------------------------------------------------------ the model

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        args = self.args
        if not isinstance(args, LanguageModelArguments):
            return model, args.model_options(model) if isinstance(args, ModelArguments) else {}
        is_path = isinstance(model, str | os.PathLike)
        if is_path:
            source = base_of(model) if has_adapters(model) else model
            config: Any = read_config(source, trust_remote_code=args.trusts_model)
        else:
            config = getattr(model, "config", model)
        changes = args.auxiliary(config)
        new = {name: value for name, value in changes.items() if getattr(config, name, None) != value}
        if not is_path:
            # A model has a copy of the coefficient, which its forward reads.
            holders = [config, *(model.modules() if isinstance(model, nn.Module) else ())]
            for name, value in changes.items():
                for holder in (one for one in holders if one is config or name in vars(one)):
                    setattr(holder, name, value)
        return model, args.model_options(model, new)

    def _example(self, spec: ModelSpec) -> Batch | Workload | None:
        dataset = self.train_dataset
        if hasattr(dataset, "lengths"):
            longest = max(dataset.lengths)
        elif (most := getattr(dataset, "longest", None)) is not None:
            longest = most[0]
        else:
            return None
        num_rows, num_tokens = self.args.of_example
        longest += num_tokens
        return Workload(num_rows * self.args.per_device_train_batch_size, longest, longest)

    def _take_pipeline(self) -> None:
        config = self.pipe.adapter.config
        if config.is_encoder_decoder:
            raise UserError(f"{config.model_type} is an encoder-decoder; give a decoder-only model")
        if self.data_collator is None:
            self.data_collator = self._collator()
        self._check_loss()
        if getattr(self.args, "disable_dropout", False):
            for stage in self.pipe.weights.every_model:
                for module in stage.model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0

    def _check_loss(self) -> None:
        """Raise UserError where a given Pipeline has another loss than the arguments ask for."""
        if self.pipe.loss != (asked := self._loss):
            raise UserError(
                f"the given Pipeline has the loss {self.pipe.loss}, and the arguments ask for {asked}; make it with "
                "that loss, or give the model"
            )

    # ------------------------------------------------------------------ the data

    def _prepare_data(self, model: Any) -> None:
        if self.processing_class is None:
            self.processing_class = self._tokenizer_beside(model)
        datasets: dict[str, Any] = {}

        def prepare() -> None:
            if self.train_dataset is None and self.eval_dataset is None:
                raise UserError("`train_dataset` is required; give the rows to train on, or others as eval_dataset")
            datasets["train"] = self._examples(self.train_dataset, is_training=True)
            datasets["eval"] = each(self.eval_dataset, self._examples)
            if self.data_collator is None and self._tokenizer is None:
                raise UserError("processing_class is None; give the tokenizer, whose padding token fills shorter rows")

        self.world.from_main(prepare, takes_long=True)
        self.train_dataset, self.eval_dataset = datasets.get("train"), datasets.get("eval")

    def _tokenizer_beside(self, model: Any) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the Hub id or directory that is the model, or that it was read from; None: there is none."""
        is_path = isinstance(model, str | os.PathLike)
        source = model if is_path else source_of(model.adapter if isinstance(model, Pipeline) else model)
        if not source or (not is_path and os.path.isdir(source) and not has_tokenizer(source)):
            return None
        return read_tokenizer(source, trust_remote_code=getattr(self.args, "trust_remote_code", False))

    def _examples(self, dataset: Any, name: str | None = None, *, is_training: bool = False) -> Any:
        """The examples of a dataset to train or to evaluate on, which may be examples already; None for None.

        `name`: that of one of several datasets.
        """
        if dataset is None:
            return None
        if not has_index(dataset):
            return self._streamed(dataset, name, is_training=is_training)
        kind = self.examples
        if isinstance(dataset, kind):
            return dataset
        # Rows of ids may come from elsewhere, except for those of prompts: their texts are needed.
        known_by, with_prompt = kind.columns[0], "prompt_ids"
        if kind.takes_ids and len(dataset) and known_by in (row := dataset[0]):
            if known_by != with_prompt and with_prompt in row:
                raise DataError(
                    f"the dataset has the column {with_prompt!r}: its answers are without their prompts; give the "
                    f"rows of text, or a dataset of {kind.__name__}"
                )
            return dataset
        if self._tokenizer is None:
            raise UserError(f"processing_class is None; give the tokenizer, or a dataset of {kind.__name__}")
        options = self._options_of_examples(dataset, name)
        return kind(dataset, self._tokenizer, max_length=self.args.max_length, **options)

    def _options_of_examples(self, dataset: Any, name: str | None) -> dict[str, Any]:
        """More arguments of the class of the examples, for a dataset and its name."""
        return {}

    def _streamed(self, rows: Any, name: str | None = None, *, is_training: bool) -> Any:
        """The examples of an iterable without an index: a stream to train on, and a dataset to evaluate on."""
        if isinstance(rows, EncodedStream):
            return rows
        if not is_training:
            return self._examples(list(rows), name)
        if iter(rows) is rows:
            raise DataError(
                "train_dataset is an iterator, which can be read once; give a map-style or iterable dataset"
            )
        stream = encoded_stream(rows, partial(self._examples, is_training=True))
        if isinstance(most := self.args.max_length, int):
            stream.longest = most, most
        return stream

    def _collator(self) -> Collate:
        """Makes mini-batches, where no collator was given."""
        return self._reading(self.examples.collator(self._padding))

    def _reading(self, collator: Any) -> Collate:
        """A collator that reads the columns of the task alone, whatever others rows from elsewhere have."""
        is_of_any = isinstance(collator, ExampleCollator)
        return replace(collator, columns=self._collated_columns) if is_of_any else collator

    def _completed(self, dataset: Any) -> Any:
        """The examples to evaluate on with all that the loss reads; every process calls it."""
        return dataset

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], part: str) -> Iterable[Batch] | None:
        examples: list[Any] = []
        self.world.from_main(lambda: examples.append(self._examples(dataset)), takes_long=True)
        return super()._evaluated(self._completed(examples[0] if examples else None), generation, part)

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return super()._eval_batches(self._examples(dataset))

    # ------------------------------------------------------------------ metrics

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """The means over the units since the last call, of all processes. Every process calls it."""
        loss = self.pipe.loss
        assert isinstance(loss, NotingLoss)
        means = loss.means(self.world.all_reduce, is_training=is_training)
        return means | self._auxiliary_loss(is_training=is_training)

    def _auxiliary_loss(self, *, is_training: bool) -> dict[str, float]:
        """The mean auxiliary loss of experts since the last call, without its weight; empty where it is not added."""
        if not (self.pipe.adapter.routers and self.pipe.loss.adds_auxiliary):
            return {}
        noted = [model.router_port.take(is_training=is_training) for model in self.pipe.weights.every_model]
        total, count = self.world.all_reduce(torch.stack(noted).sum(dim=0)).tolist()
        weight = coefficient_of(self.pipe.adapter.reference)
        return {"aux_loss": total / count / weight} if count and weight else {}


def each(datasets: Any, function: Callable[[Any, str | None], Any]) -> Any:
    """The result of a function for a dataset and None, or for each of a dict of several and its name."""
    if isinstance(datasets, Mapping):
        return {name: function(dataset, name) for name, dataset in datasets.items()}
    return function(datasets, None)


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
