"""Evaluation and prediction of the trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from transformers import EvalPrediction, TrainerState
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize, speed_metrics

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import UserError
from hf_gpipe.runtime.whereabouts import during
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import TrainerBase
from hf_gpipe.training.generating import Generation, generation_options
from hf_gpipe.training.scoring import Predicted, concatenated, score


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
        with_predictions = self.compute_metrics is not None and not self.args.prediction_loss_only
        _, metrics = self._score(
            dataset,
            prefix,
            generation,
            "evaluation requires an eval_dataset",
            with_predictions=with_predictions,
            keeps_predictions=False,
        )
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
            test_dataset: what to predict.
            ignore_keys: without effect: a pipeline returns no other outputs than logits.
            metric_key_prefix: goes before the metrics' names.
            generation: with `predict_with_generate`, keyword arguments of `generate`.

        Returns:
            Of all rows, or with `eval_do_concat_batches=False` in lists with an entry a mini-batch: the logits, what
            `preprocess_logits_for_metrics` left of them, or with `predict_with_generate` the tokens; and the labels.
            Shorter rows are filled with -100, tokens with the padding token.
        """
        self._check_surface()
        predicted, metrics = self._score(
            test_dataset, metric_key_prefix, generation, "prediction requires a test_dataset"
        )
        self._fire("on_predict", metrics=metrics)
        mine = self._arrays(predicted) if predicted else None
        predictions, labels, *_ = self._shared(mine, self._last_process) or (None, None)
        return PredictionOutput(predictions, labels, metrics)

    def _score(
        self,
        dataset: Any,
        prefix: str,
        generation: Mapping[str, Any],
        required: str,
        *,
        with_predictions: bool = True,
        keeps_predictions: bool = True,
    ) -> tuple[list[Predicted], dict[str, float]]:
        if not self._shared(dataset is not None):
            raise UserError(required)
        if generation and not self.args.predict_with_generate:
            raise UserError(f"{next(iter(generation))}: generation needs predict_with_generate=True")
        start_time = time.time()
        batches = None
        if dataset is not None:
            batches = self._eval_batches(dataset)
        self.callback_handler.eval_dataloader = batches
        generates = with_predictions and self.args.predict_with_generate
        self._generation = self._new_generation(generation) if generates else None
        computes = with_predictions and self.compute_metrics is not None
        in_parts = computes and self.args.batch_eval_metrics
        predicted: list[Predicted] = []
        computed: dict[str, Any] = {}

        def take(one: Predicted, is_last: bool) -> None:
            if in_parts:
                computed.update(self._computed([one], compute_result=is_last) or {})
            if keeps_predictions or not in_parts:
                predicted.append(one)

        with self.pipe.holding_weights(), during("evaluating"):
            scores = score(
                self.pipe,
                batches,
                on_predicted=take if with_predictions else None,
                preprocess=self.preprocess_logits_for_metrics,
                generation=self._generation,
                on_batch=lambda: self._fire("on_prediction_step"),
            )
        metrics: dict[str, Any] = {"loss": scores.mean_loss(only_finite=self.args.logging_nan_inf_filter)}
        if computes:
            if predicted and not in_parts:
                computed.update(self._computed(predicted) or {})
            metrics |= self._shared(computed, self._last_process)
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        num_rows = sum(scores.num_rows)
        steps = math.ceil(num_rows / self.args.per_device_eval_batch_size)
        metrics |= speed_metrics(prefix, start_time, num_samples=num_rows, num_steps=steps)
        return predicted, self._shared(metrics)

    def _computed(self, predicted: list[Predicted], **options: bool) -> dict[str, Any] | None:
        """What `compute_metrics` says of the predictions, in the process that has them."""
        assert self.compute_metrics is not None
        predictions, labels, inputs, row_losses = self._arrays(predicted)
        wanted = self.args.include_for_metrics
        prediction = EvalPrediction(
            predictions=predictions,
            label_ids=labels,
            inputs=inputs if "inputs" in wanted else None,
            losses=row_losses if "loss" in wanted else None,
        )
        metrics: dict[str, Any] | None = denumpify_detensorize(self.compute_metrics(prediction, **options))
        return metrics

    def _arrays(self, predicted: list[Predicted]) -> tuple[Any, Any, Any, Any]:
        """Predictions, labels, inputs and losses of rows, in one array each or as lists."""
        fill = IGNORED_LABEL if self._generation is None else self._generation.pad_token_id
        columns = (
            [one.predictions for one in predicted],
            [one.labels for one in predicted],
            [one.inputs for one in predicted],
            [one.row_losses for one in predicted],
        )
        if not self.args.eval_do_concat_batches:
            return columns
        predictions, *others = columns
        return concatenated(predictions, fill), *(concatenated(one) for one in others)

    def _new_generation(self, options: Mapping[str, Any]) -> Generation:
        pad_token_id = getattr(self.processing_class, "pad_token_id", None)
        return Generation(self.pipe, generation_options(self.args, options), self._shared(pad_token_id))


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
