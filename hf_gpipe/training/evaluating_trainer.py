"""The mini-batches that a trainer makes of datasets, and evaluation on them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import transformers

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.libraries.transformers_trainer import PredictionOutput
from hf_gpipe.model.opening import chain_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.training.base import example_of
from hf_gpipe.training.evaluator import Evaluator
from hf_gpipe.training.loader import LABEL_COLUMNS, Batch, MiniBatches
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.saving_trainer import SavingTrainer
from hf_gpipe.training.steps import data_seed

logger = transformers.logging.get_logger(__name__)


class EvaluatingTrainer(SavingTrainer):
    """Reads datasets and evaluates on them, by the methods of transformers' Trainer."""

    #: The columns of rows that the collator reads beside the columns that the model reads.
    _collated_columns: tuple[str, ...] = ()

    @by_every_process
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Loss and the metrics of `compute_metrics`; the same in every process.

        The loss is the training's loss, without dropout. As in transformers' Trainer, it is the mean over rows of the
        loss of their mini-batch.

        Args:
            eval_dataset: a dataset in place of the trainer's, or a name of the trainer's dict. A dict of datasets gives
                the metrics of each dataset under its name.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.
        """
        self._check_surface()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            part = self.eval_dataset[dataset] if isinstance(self.eval_dataset, Mapping) else None
            return self._evaluate_one(part, metric_key_prefix, generation)
        dataset = self._by_name(dataset)
        if not isinstance(dataset, Mapping):
            return self._evaluate_one(dataset, metric_key_prefix, generation)
        metrics: dict[str, float] = {}
        for name, part in dataset.items():
            metrics |= self._evaluate_one(part, f"{metric_key_prefix}_{name}", generation)
        return metrics

    def _by_name(self, given: Any) -> Any:
        """The dataset to evaluate; a dict by name where the main process has several, with None in other processes."""
        names = self.world.from_main(lambda: list(given) if isinstance(given, Mapping) else None)
        if names is None:
            return given
        return {name: given[name] if isinstance(given, Mapping) else None for name in names}

    def _check_evaluations(self) -> None:
        """Raise UserError where the training would evaluate without a dataset, or choose its best model by nothing."""
        args = self.args
        if args.metric_for_best_model is None and (args.save_strategy == "best" or args.load_best_model_at_end):
            asked = "load_best_model_at_end=True" if args.load_best_model_at_end else "save_strategy='best'"
            raise UserError(f"{asked} needs metric_for_best_model, the metric that decides, such as 'loss'; give it")
        if args.save_strategy == "best" and args.eval_strategy == "no" and self.world.is_main:
            logger.warning(
                "save_strategy='best' saves after evaluations, and eval_strategy='no' asks for none; give eval_strategy"
            )
        if self.args.eval_strategy == "no" or type(self).evaluate is not EvaluatingTrainer.evaluate:
            return
        if not self.world.from_main(lambda: self.eval_dataset is not None):
            strategy = str(getattr(self.args.eval_strategy, "value", self.args.eval_strategy))
            raise UserError(
                f"eval_strategy={strategy!r} requires an eval_dataset; give one, or leave eval_strategy out"
            )

    def _evaluate_one(self, dataset: Any, prefix: str, generation: Mapping[str, Any]) -> dict[str, float]:
        batches = self._evaluated(dataset, generation, "evaluation requires an eval_dataset")
        with self.job.during("evaluating"):
            metrics = Evaluator(self, prefix, generation).evaluate(batches)
        self.log(metrics)
        self.fire("on_evaluate", metrics=metrics)
        return metrics

    @by_every_process
    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a dataset; the same in every process.

        A dataset without labels gives only predictions, and the metrics of speed.

        Args:
            test_dataset: the examples.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.

        Returns:
            The logits of all rows, what `preprocess_logits_for_metrics` left of them, or the tokens with
            `predict_with_generate`; and the labels. Shorter rows are filled with -100, tokens with the padding token.
            With `eval_do_concat_batches=False` they are lists with an entry for each mini-batch.
        """
        self._check_surface()
        batches = self._evaluated(test_dataset, generation, "prediction requires a test_dataset")
        with self.job.during("evaluating"):
            prediction = Evaluator(self, metric_key_prefix, generation).predict(batches)
        self.fire("on_predict", metrics=prediction.metrics)
        return prediction

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        """The mini-batches of a dataset; None in processes that do not read data.

        Raises UserError where no process has a dataset, or where options of generation are not used.
        """
        if not self.world.from_main(lambda: dataset is not None):
            raise UserError(required)
        if generation and not self.args.predict_with_generate:
            raise UserError(f"{next(iter(generation))}: generation needs predict_with_generate=True")
        batches = None
        if dataset is not None:
            batches = self._eval_batches(dataset)
        self.callback_handler.eval_dataloader = batches
        return None if batches is None else batches.epoch(0)

    # ------------------------------------------------------------------ the data

    def get_train_dataloader(self) -> MiniBatches:
        """The mini-batches of the training. Iterating over them gives the first epoch.

        Raises UserError in a process that has no training dataset.
        """
        args, dataset = self.args, _given(self.train_dataset, "training requires a train_dataset")
        return replace(
            self._batches(dataset, args.size, args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            temperature=args.sampling_temperature,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> MiniBatches:
        """The mini-batches of an evaluation; `eval_dataset` may be a name of the trainer's dict of datasets.

        Raises UserError in a process that has no such dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._eval_batches(_given(dataset, "evaluation requires an eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> MiniBatches:
        """The mini-batches of a prediction."""
        return self._eval_batches(_given(test_dataset, "prediction requires a test_dataset"))

    def train_batches(self) -> MiniBatches | None:
        """The mini-batches of the training dataset; None in processes that do not read data."""
        if not self.world.from_main(lambda: self.train_dataset is not None):
            raise UserError("training requires a train_dataset")
        return self.get_train_dataloader() if self.world.is_main else None

    def _example(self, spec: ModelSpec) -> Batch | Workload | None:
        """A mini-batch, or its shape; from the first training row for a model that reads no tokens."""
        chain = chain_of(spec)
        if chain is None:
            return example_of(self.train_dataset, self.args)
        if not has_index(self.train_dataset) or not len(self.train_dataset):
            return None
        read = {*inspect.signature(chain.forward).parameters, *Adapter.loss_keys}
        row = next(iter(self._batches(self.train_dataset, BatchSize(1), read=read)))
        return Workload.of_entries(tensors_of(row)).of_rows(self.args.per_device_train_batch_size)

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return self._batches(dataset, BatchSize(self.args.per_device_eval_batch_size))

    def _batches(
        self,
        dataset: Any,
        size: BatchSize,
        order: str = "sequential",
        read: set[str] | None = None,
    ) -> MiniBatches:
        """Make the mini-batches of a dataset. `read`: the columns that the model reads, before there is a pipeline."""
        columns = None
        if self.args.remove_unused_columns:
            if read is None:
                adapter = self.pipe.adapter
                read = {*inspect.signature(adapter.reference.forward).parameters, *adapter.loss_keys}
            columns = read | LABEL_COLUMNS | {*self._collated_columns}
            if getattr(self.data_collator, "padding_free", False):
                # TRL's collator reads the lengths of packed documents from it.
                columns.add("seq_lengths")
        names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return MiniBatches(
            dataset,
            self.data_collator,
            size,
            order,
            seed=data_seed(self.args),
            columns=columns,
            length_column=self.args.length_column_name,
            workers=options if options["num_workers"] else None,
        )


def _given(dataset: Any, required: str) -> Any:
    if dataset is None:
        raise UserError(required)
    return dataset
