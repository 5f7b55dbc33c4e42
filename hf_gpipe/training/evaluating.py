"""Evaluation and prediction of the trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from transformers import EvalPrediction, TrainerState
from transformers.trainer_utils import PredictionOutput, denumpify_detensorize, speed_metrics

from hf_gpipe.errors import UserError
from hf_gpipe.runtime.whereabouts import during
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import TrainerBase
from hf_gpipe.training.scoring import Scores, score


class EvaluatingTrainer(TrainerBase):
    """A trainer that can evaluate and predict; the results are the same in every process."""

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss per target token and the metrics of `compute_metrics`; the same in every process.

        Args:
            eval_dataset: in place of the trainer's; a dict of datasets gives each one's metrics under its name.
            metric_key_prefix: goes before the metrics' names.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        names = self._shared(list(dataset) if isinstance(dataset, Mapping) else None)
        if names is None:
            return self._evaluate(dataset, metric_key_prefix)
        metrics: dict[str, float] = {}
        for name in names:
            one = dataset[name] if isinstance(dataset, Mapping) else None
            metrics |= self._evaluate(one, f"{metric_key_prefix}_{name}")
        return metrics

    def _evaluate(self, dataset: Any, prefix: str) -> dict[str, float]:
        with_predictions = self.compute_metrics is not None and not self.args.prediction_loss_only
        _, metrics = self._score(dataset, prefix, with_predictions, "evaluation requires an eval_dataset")
        self.log(metrics)
        self._fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Logits (or what `preprocess_logits_for_metrics` leaves of them), labels and metrics of a dataset with labels.

        They are the same in every process. Predictions and labels are padded with -100.
        """
        scores, metrics = self._score(test_dataset, metric_key_prefix, True, "prediction requires a test_dataset")
        self._fire("on_predict", metrics=metrics)
        predictions, labels = self._shared((scores.predictions, scores.labels), self._last_process)
        return PredictionOutput(predictions, labels, metrics)

    def _score(
        self, dataset: Any, prefix: str, with_predictions: bool, required: str
    ) -> tuple[Scores, dict[str, float]]:
        if not self._shared(dataset is not None):
            raise UserError(required)
        start_time = time.time()
        batches = None
        if dataset is not None:
            batches = self._batches(dataset, self.args.per_device_eval_batch_size)
        self.callback_handler.eval_dataloader = batches
        with during("evaluating"), self.pipe.holding_weights():
            scores = score(
                self.pipe,
                batches,
                with_predictions=with_predictions,
                preprocess=self.preprocess_logits_for_metrics,
                on_batch=lambda: self._fire("on_prediction_step"),
            )
        metrics: dict[str, Any] = {"loss": scores.loss}
        if with_predictions and self.compute_metrics is not None:
            metrics |= self._shared(self._computed(scores), self._last_process)
        metrics = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        steps = math.ceil(scores.num_rows / self.args.per_device_eval_batch_size)
        metrics |= speed_metrics(prefix, start_time, num_samples=scores.num_rows, num_steps=steps)
        return scores, self._shared(metrics)

    def _computed(self, scores: Scores) -> dict[str, Any]:
        """What `compute_metrics` says of the predictions, in the process that has them."""
        if self.compute_metrics is None or scores.predictions is None:
            return {}
        wanted = self.args.include_for_metrics
        prediction = EvalPrediction(
            predictions=scores.predictions,
            label_ids=scores.labels,
            inputs=scores.inputs if "inputs" in wanted else None,
            losses=scores.row_losses if "loss" in wanted else None,
        )
        metrics: dict[str, Any] = denumpify_detensorize(self.compute_metrics(prediction))
        return metrics


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
