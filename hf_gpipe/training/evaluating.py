"""Evaluation and prediction of the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerState
from transformers.trainer_utils import PredictionOutput

from hf_gpipe.errors import UserError
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import TrainerBase
from hf_gpipe.training.evaluator import Evaluator
from hf_gpipe.training.loader import Batch


class EvaluatingTrainer(TrainerBase):
    """A trainer that can evaluate and predict; the results are the same in every process."""

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Loss and the metrics of `compute_metrics`; the same in every process.

        The loss is the one trained on, without dropout, and like transformers' Trainer's the mean over rows of the loss
        of their mini-batch.

        Args:
            eval_dataset: in place of the trainer's; a dict of datasets, or a name of the trainer's dict, gives each
                one's metrics under its name.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.
        """
        self._check_surface()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = {dataset: self.eval_dataset[dataset] if isinstance(self.eval_dataset, Mapping) else None}
        names = self._shared(list(dataset) if isinstance(dataset, Mapping) else None)
        if names is None:
            return self._evaluate(dataset, metric_key_prefix, generation)
        metrics: dict[str, float] = {}
        for name in names:
            one = dataset[name] if isinstance(dataset, Mapping) else None
            metrics |= self._evaluate(one, f"{metric_key_prefix}_{name}", generation)
        return metrics

    def _evaluate(self, dataset: Any, prefix: str, generation: Mapping[str, Any]) -> dict[str, float]:
        batches = self._evaluated(dataset, generation, "evaluation requires an eval_dataset")
        with self.job.during("evaluating"):
            metrics = self._evaluator().evaluate(batches, prefix, generation)
        self.log(metrics)
        self._fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a dataset with labels; the same in every process.

        Args:
            test_dataset: the examples.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.

        Returns:
            Of all rows, or with `eval_do_concat_batches=False` in lists with an entry per mini-batch: the logits, what
            `preprocess_logits_for_metrics` left of them, or with `predict_with_generate` the tokens; and the labels.
            Shorter rows are filled with -100, tokens with the padding token.
        """
        self._check_surface()
        batches = self._evaluated(test_dataset, generation, "prediction requires a test_dataset")
        with self.job.during("evaluating"):
            prediction = self._evaluator().predict(batches, metric_key_prefix, generation)
        self._fire("on_predict", metrics=prediction.metrics)
        return prediction

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        """The mini-batches of a dataset; None in processes that do not read data.

        Raises UserError where no process has a dataset, or where options of generation are not used.
        """
        if not self._shared(dataset is not None):
            raise UserError(required)
        if generation and not self.args.predict_with_generate:
            raise UserError(f"{next(iter(generation))}: generation needs predict_with_generate=True")
        batches = None
        if dataset is not None:
            batches = self._eval_batches(dataset)
        self.callback_handler.eval_dataloader = batches
        return None if batches is None else batches.epoch(0)

    def _evaluator(self) -> Evaluator:
        """Made for each call: a script may have set another `compute_metrics` since the last one."""
        pad_token_id = self._shared(getattr(self.processing_class, "pad_token_id", None))
        return Evaluator(
            self.pipe,
            self.args,
            self.compute_metrics,
            self.preprocess_logits_for_metrics,
            pad_token_id,
            on_batch=lambda: self._fire("on_prediction_step"),
        )


def metric_of(args: PipelineTrainingArguments, metrics: Mapping[str, float]) -> float:
    """The metric that decides which model is best. Raises UserError where it is not among `metrics`."""
    name = args.metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise UserError(f"metric_for_best_model: {name!r} is not among the metrics {', '.join(metrics)}")
    return metrics[name]


def note_best(state: TrainerState, args: PipelineTrainingArguments, metrics: Mapping[str, float]) -> bool:
    """Whether these metrics are the best so far, which the state then notes."""
    if args.metric_for_best_model is None:
        return False
    value, best = metric_of(args, metrics), state.best_metric
    if best is not None and not (value > best if args.greater_is_better else value < best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True
